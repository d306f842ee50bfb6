"""The model's endpoint fails for good, or never answers; the sandbox host is killed while a command runs.

What fails once is asked again and nobody sees it: tests/system/test_models.py.
"""

import json
import signal
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.fleet import ENDS_WITHIN_S, Fleet
from tests.faults.view import View
from tests.waiting import eventually

ASKED = 5  # times: the graph's model is set to try again four times
# What the endpoint does each time, and the error that the run ends with.
BROKEN = {
    "rate-limited": ({"status": 429, "retry_after_s": 0.01}, "OpenAIRateLimitError"),
    "failing": ({"status": 500, "retry_after_s": 0.01}, "OpenAIAPIError"),
    "dropping": ({"drop": True}, "OpenAIConnectionError"),
}
SILENT = ["timed-out", "cancelled"]


@dataclass
class Story:
    view: View
    journal: list[tuple[int, int, str]]
    status: str
    error: dict[str, str] | None
    calls: int
    """How often the model was asked."""
    thread: str
    """Status of the thread."""


async def begin(fleet: Fleet, name: str, fault: dict[str, Any], **options: Any) -> str:
    script = {"turns": [{"text": "never said", "faults": [{**fault, "times": None}]}]}
    prompt = f"hi #script:{json.dumps(script)} #id:{name}"
    given = {"messages": [{"role": "user", "content": prompt}]}
    return await fleet.begin("messages", given, stream_mode="messages-tuple", **options)


@pytest.fixture(scope="module")
async def stories(fleet: Fleet) -> dict[str, Story]:
    """All at once: each waits for its own end."""
    runs = {name: await begin(fleet, name, fault) for name, (fault, _) in BROKEN.items()}
    runs["cancelled"] = await begin(fleet, "cancelled", {"hang": True})
    runs["timed-out"] = await begin(fleet, "timed-out", {"hang": True}, after_seconds=2)
    # As SANDFLEET_RUN_TIMEOUT_S would have it.
    await fleet.sql("update runs set timeout_s = 3 where run_id = %s", runs["timed-out"])
    await eventually(lambda: fleet.calls("cancelled"), ENDS_WITHIN_S, "the model is asked")
    await fleet.client.runs.cancel(fleet.views[runs["cancelled"]].thread_id, runs["cancelled"], wait=True)
    return {name: await story(fleet, name, run_id) for name, run_id in runs.items()}


async def story(fleet: Fleet, name: str, run_id: str) -> Story:
    view = await fleet.seen(run_id)
    ((status, error),) = await fleet.sql("select status, error from runs where run_id = %s", run_id)
    thread = await fleet.client.threads.get(view.thread_id)
    calls = len(await fleet.calls(name))
    return Story(view, await fleet.journal(run_id), status, error, calls, thread["status"])


@pytest.mark.parametrize("name", BROKEN)
async def test_a_model_that_keeps_failing_is_the_runs_error(stories: dict[str, Story], name: str) -> None:
    """Asked again as often as the model is set to, then told to the client by name. Red when an attempt is lost for it,
    which would ask as often again."""
    told = stories[name]
    assert (told.status, told.thread) == ("error", "error")
    assert told.calls == ASKED
    assert told.error is not None
    assert told.error["error"] == BROKEN[name][1]
    assert told.view.names[-2:] == ["error", "end"]
    assert told.view.data("error") == [told.error]


async def test_a_model_that_never_answers_is_cut_off_by_the_runs_time_limit(
    stories: dict[str, Story],
) -> None:
    """Red when nothing but the model's own client limits the wait, which is ten minutes."""
    told = stories["timed-out"]
    assert told.status == "timeout"
    assert told.error is not None
    assert told.error["error"] == "RunTimeout"
    assert told.view.names[-2:] == ["error", "end"]


async def test_a_run_whose_model_never_answers_can_be_cancelled(stories: dict[str, Story]) -> None:
    """Red when a cancel waits for the model."""
    told = stories["cancelled"]
    assert (told.status, told.thread) == ("interrupted", "interrupted")
    assert told.view.names[-1] == "end"
    assert told.calls == 1


@pytest.mark.parametrize("name", [*BROKEN, *SILENT])
async def test_each_stream_is_whole(stories: dict[str, Story], name: str) -> None:
    """Whatever became of the run."""
    assert stories[name].view.faults(stories[name].journal) == []
    assert stories[name].view.breaks == 0


async def test_a_host_that_is_killed_costs_no_more_than_a_wait(fleet: Fleet) -> None:
    """The command goes on without its host, the next host takes the sandbox over, and the call gets all of its output.
    Red when a host does not adopt what the one before it left, or executors do not come back to a command; and the check
    after this module finds containers that the next host does not remove."""
    calls = [
        {"name": "write_file", "args": {"path": "/workspace/mine", "content": "x"}},
        {"name": "execute", "args": {"command": "echo begun; sleep 3; echo ended"}},
        {"name": "execute", "args": {"command": "ls -A /workspace"}},
    ]
    run_id = await fleet.begin("sandboxed", {"calls": calls}, stream_mode=["tools", "updates"])

    def begun() -> bool:
        return any(
            "begun" in str(data) and "delta" in str(data) for data in fleet.views[run_id].data("tools")
        )

    await eventually(begun, ENDS_WITHIN_S, "the command's output")
    await fleet.stack.kill("host", signal.SIGKILL)
    await fleet.stack.restart("host")
    view = await fleet.seen(run_id)
    wrote, ran, listed = (await fleet.values(run_id))["results"]
    assert wrote.startswith("wrote")
    assert "begun\nended" in ran
    assert "mine" in listed
    assert await fleet.row(run_id) == ("success", 1, 0)
    assert view.faults(await fleet.journal(run_id)) == []
