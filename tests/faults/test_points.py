"""An executor or the API dies, or loses a reply, at each point where it matters.

One run per point, one after the other on one stack, each followed by a client; the tests look at what came of them.
Seen red: without giving back what a claim took whose reply was lost, that run waits for its lease and counts a death.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fleet import ENDS_WITHIN_S, Answer, Fleet
from tests.faults.view import View
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(1800)  # the stories come one after the other, each with a recovery

STEPS = 4
# (point, what happens there): (attempts that the run takes, deaths that are counted)
EXPECTED = {
    ("run.claimed", "kill"): (2, 1),
    ("checkpoint.before", "kill"): (2, 1),
    ("checkpoint.committed", "kill"): (2, 1),
    ("event.journalled", "kill"): (2, 1),
    ("tool.effect_done", "kill"): (2, 1),
    ("finish.before", "kill"): (2, 1),
    ("finish.committed", "kill"): (1, 0),
    ("run.claimed", "lose"): (2, 0),
    ("finish.committed", "lose"): (1, 0),
}
STEPWISE = [each for each in EXPECTED if not each[0].startswith("tool.")]
SUBMITS = ["kill", "lose"]


@dataclass
class Story:
    """What came of one run: its client's view, its row (status, attempt, deaths), its journal, its values, and how many
    checkpoints it has written."""

    view: View
    row: tuple[str, int, int]
    journal: list[tuple[int, int, str]]
    values: dict[str, Any]
    checkpoints: int


@dataclass
class Stories:
    executors: dict[tuple[str, str], Story]
    submits: dict[str, tuple[Answer, Answer, Story]]
    """Per action: the answer to the submit, the answer when it is sent again, and the run."""
    lines: str


@pytest.fixture(scope="module")
async def stories(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Stories:
    lines = tmp_path_factory.mktemp("effects") / "lines"
    lines.touch()
    executors = {each: await executor_story(fleet, *each, lines) for each in EXPECTED}
    submits = {action: await submit_story(fleet, action) for action in SUBMITS}
    return Stories(executors, submits, lines.read_text())


async def executor_story(fleet: Fleet, point: str, action: str, lines: Path) -> Story:
    await fleet.well()
    fleet.arm(point, action)
    if point.startswith("tool."):
        calls = [[{"tool": "append", "line": "once"}]]
        run_id = await fleet.begin("effects", {"path": str(lines), "calls": calls}, stream_mode="updates")
    else:
        run_id = await fleet.begin("counter", {"steps": STEPS}, stream_mode="updates")
    await fleet.reached(point)
    return await story(fleet, run_id)


async def submit_story(fleet: Fleet, action: str) -> tuple[Answer, Answer, Story]:
    await fleet.well()
    fleet.arm("submit.committed", action)
    thread = await fleet.client.threads.create()
    body = {"assistant_id": "counter", "input": {"steps": STEPS}, "stream_mode": "updates"}
    path, key = f"/threads/{thread['thread_id']}/runs", {"idempotency-key": f"submit-{action}"}
    first = await fleet.post(path, body, **key)
    await fleet.reached("submit.committed")

    async def over() -> bool:
        found = await fleet.sql("select status from runs where thread_id = %s", thread["thread_id"])
        return found == [("success",)]

    await eventually(over, ENDS_WITHIN_S, "the end of the run, of which nobody was told")

    async def again() -> Answer | None:
        answer = await fleet.post(path, body, **key)
        return answer if answer.status == 200 else None

    second = await eventually(again, 60, "the API")
    ((count,),) = await fleet.sql("select count(*) from runs where thread_id = %s", thread["thread_id"])
    assert count == 1, "accepted twice"
    fleet.follow(thread["thread_id"], second.body["run_id"])
    return first, second, await story(fleet, second.body["run_id"])


async def story(fleet: Fleet, run_id: str) -> Story:
    view = await fleet.seen(run_id)
    ((checkpoints,),) = await fleet.sql("select count(*) from checkpoints where run_id = %s", run_id)
    return Story(
        view, await fleet.row(run_id), await fleet.journal(run_id), await fleet.values(run_id), checkpoints
    )


@pytest.fixture(params=EXPECTED, ids=" ".join)
def at(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


async def test_the_run_succeeds(stories: Stories, at: tuple[str, str]) -> None:
    """Red when a run is left as it was, or ends by the fault."""
    assert stories.executors[at].row == ("success", *EXPECTED[at])


@pytest.mark.parametrize("at", STEPWISE, ids=" ".join)
async def test_every_step_counts_once(stories: Stories, at: tuple[str, str]) -> None:
    """Red when a step that is in a checkpoint is run again, which would write another one, or one that is not is left out."""
    assert stories.executors[at].checkpoints == 1 + 1 + STEPS, "the input's, the start's, and each step's"
    assert stories.executors[at].values["digest"] == expected_digest(STEPS)
    assert stories.executors[at].values["done"] == list(range(1, STEPS + 1))


async def test_the_client_sees_every_event_once(stories: Stories, at: tuple[str, str]) -> None:
    """Its stream does not break: each attempt begins with ``metadata``, the last one ends with ``end``."""
    story = stories.executors[at]
    assert story.view.faults(story.journal) == []
    assert story.view.breaks == 0
    attempts = [data["attempt"] for data in story.view.data("metadata")]
    assert attempts == sorted(set(attempts))
    assert attempts[-1] == story.row[1]


async def test_an_effect_takes_place_once_and_its_doubt_is_told(stories: Stories) -> None:
    """Red when the tool is called again by the next attempt."""
    assert stories.lines == "once\n"
    ((status, content),) = stories.executors["tool.effect_done", "kill"].values["results"]
    assert status == "error"
    assert "may or may not have taken effect" in content


@pytest.mark.parametrize(("action", "status"), [("kill", 0), ("lose", 503)])
async def test_a_submit_whose_answer_is_lost_is_accepted_once(
    stories: Stories, action: str, status: int
) -> None:
    """The connection breaks, or the answer is 503, and no executor is woken; sent again with its Idempotency-Key, it names
    the run that was made. Red when the key is kept apart from the run, or nobody looks for runs that nobody was told of."""
    first, second, story = stories.submits[action]
    assert first.status == status
    assert second.body["run_id"] == story.view.run_id
    assert story.row == ("success", 1, 0)
    assert story.view.faults(story.journal) == []
