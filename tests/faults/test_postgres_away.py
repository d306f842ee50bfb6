"""PostgreSQL is away: for 30 s frozen, so that connections to it hang, or for 15 s stopped, so that they are refused.

One outage of each kind is recorded from all sides at once; each test asserts one thing about the record. Both are told by
what clients see: runs pause and go on, streams stay open, submits are refused and can be sent again.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.fleet import LEASE_S, Answer, Fleet
from tests.faults.view import View
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

pytestmark = pytest.mark.long

AWAY_S = {"frozen": 30.0, "stopped": 15.0}
STEPS = 60
CALLS = 60
WORDS = 500
SLACK_S = 3.0  # for what had begun before

TOKENS = f'hi #script:{{"words": {WORDS}, "chunk_chars": 8, "chunk_delay_ms": 100}}'


@dataclass
class Outage:
    """What was seen of one outage, which lasted from ``began`` to ``ended`` (`time.monotonic`)."""

    began: float
    ended: float
    rows: dict[str, tuple[str, int, int]]
    """Status, attempt and deaths, at the end, of the runs that were running when it began."""
    views: dict[str, View]
    journals: dict[str, list[tuple[int, int, str]]]
    counted: list[dict[str, Any]]
    """Values of the runs of `counter`."""
    tokens: View
    """Of the run that a model was writing to."""
    text: str
    """What the model had written at the end."""
    calls: list[float]
    """When the model was called by the node that calls it again and again."""
    submits: list[Answer]
    resent: list[Answer]
    accepted: list[str]
    """The final status of each submitted run."""
    made: list[tuple[Any, ...]]
    """How many runs there are per submit."""
    cancel: Answer
    cancelled: str
    """The final status of the run that was to be cancelled."""
    processes: tuple[dict[str, int], dict[str, int]]
    """Process ids of API, executors and host before and after."""


@pytest.fixture(scope="module", params=["frozen", "stopped"])
async def outage(fleet: Fleet, request: pytest.FixtureRequest) -> Outage:
    await fleet.well()
    kind: str = request.param
    counters = [
        await fleet.begin("counter", {"steps": STEPS, "delay_ms": 100}, stream_mode="updates") for _ in "abc"
    ]
    prompt = {"messages": [{"role": "user", "content": TOKENS}]}
    tokens = await fleet.begin("messages", prompt, stream_mode="messages-tuple")
    talk = {"id": kind, "times": CALLS, "pause_ms": 200}
    talker = await fleet.begin("talkative", talk, stream_mode="updates")
    doomed = await fleet.begin("slow", {"seconds": 120, "piece_ms": 200}, stream_mode="custom")
    running = [*counters, tokens, talker]

    async def begun() -> bool:
        seen = [len(fleet.views[run_id].events) for run_id in (*counters, tokens, doomed)]
        return min(seen) > 3 and len(await fleet.calls(kind)) > 1

    await eventually(begun, 60, "all runs under way")
    before = fleet.processes()
    began = time.monotonic()
    if kind == "frozen":
        async with fleet.frozen("postgres"):
            submitting, cancelling = await knock(fleet, kind, doomed)
    else:
        await fleet.stop("postgres")
        submitting, cancelling = await knock(fleet, kind, doomed)
        await fleet.stack.restart("postgres")
    ended = time.monotonic()
    submits, cancelled = await asyncio.gather(*submitting), await cancelling
    resent = [await send_again(fleet, kind, n) for n in range(len(submits))]
    await eventually(lambda: cancelled_now(fleet, doomed), 60, "the cancel")
    views = {run_id: await fleet.seen(run_id) for run_id in (*running, doomed)}
    return Outage(
        began=began,
        ended=ended,
        rows={run_id: await fleet.row(run_id) for run_id in running},
        views=views,
        journals={run_id: await fleet.journal(run_id) for run_id in views},
        counted=[await fleet.values(run_id) for run_id in counters],
        tokens=views[tokens],
        text=(await fleet.values(tokens))["messages"][-1]["content"],
        calls=await fleet.calls(kind),
        submits=submits,
        cancel=cancelled,
        cancelled=await fleet.over(doomed),
        resent=resent,
        accepted=[await fleet.over(answer.body["run_id"]) for answer in resent],
        made=await fleet.sql(
            "select k.key, count(r.run_id) from idempotency_keys k left join runs r using (tenant, user_id, thread_id)"
            " where k.key like %s group by k.key",
            f"{kind}-%",
        ),
        processes=(before, fleet.processes()),
    )


async def knock(
    fleet: Fleet, kind: str, doomed: str
) -> tuple[list["asyncio.Task[Answer]"], "asyncio.Task[Answer]"]:
    """A submit every second and a half while the outage lasts, and one cancel at its beginning."""
    over = time.monotonic() + AWAY_S[kind]
    cancelling = asyncio.create_task(fleet.post(cancel_path(fleet, doomed), None))
    submitting = []
    while (left := over - time.monotonic()) > 0:
        submitting.append(asyncio.create_task(submit(fleet, kind, len(submitting))))
        await asyncio.sleep(min(1.5, left))
    return submitting, cancelling


def cancel_path(fleet: Fleet, run_id: str) -> str:
    return f"/threads/{fleet.views[run_id].thread_id}/runs/{run_id}/cancel"


async def submit(fleet: Fleet, kind: str, n: int) -> Answer:
    body = {"assistant_id": "counter", "input": {"steps": 2}, "on_completion": "keep"}
    return await fleet.post("/runs", body, **{"idempotency-key": f"{kind}-{n}"})


async def send_again(fleet: Fleet, kind: str, n: int) -> Answer:
    """What a client does with a submit that was refused: it sends it again until it is taken."""

    async def taken() -> Answer | None:
        answer = await submit(fleet, kind, n)
        return answer if answer.status == 200 else None

    return await eventually(taken, 60, "a submit")  # type: ignore[no-any-return]


async def cancelled_now(fleet: Fleet, run_id: str) -> bool:
    return (await fleet.post(cancel_path(fleet, run_id), None)).status in (202, 404)


async def test_no_attempt_is_lost(outage: Outage) -> None:
    """Neither taken over nor counted as a death. The rule that leases do not expire meanwhile is tried out in
    tests/gates/test_expiry.py: here renewals mostly come before the sweep."""
    assert set(outage.rows.values()) == {("success", 1, 0)}


async def test_every_step_counts_once(outage: Outage) -> None:
    """No work is lost, and none is done twice."""
    assert [values["digest"] for values in outage.counted] == [expected_digest(STEPS)] * 3
    assert outage.text == " ".join(f"w{n}" for n in range(WORDS))


async def test_no_process_ends_of_it(outage: Outage) -> None:
    """Red when an error of the database's gets out of a loop."""
    before, after = outage.processes
    assert before == after


async def test_streams_stay_open_and_miss_nothing(outage: Outage) -> None:
    """Each event once and in order, and no break. Red when the API gives a stream up with the database."""
    for run_id, view in outage.views.items():
        assert view.faults(outage.journals[run_id]) == [], run_id
        assert view.breaks == 0


async def test_tokens_arrive_while_it_is_away(outage: Outage) -> None:
    """A model that was writing goes on, and its client sees it. Red when token deltas wait for a commit."""
    arrived = [each.at for each in outage.tokens.events if each.event == "messages"]
    assert [at for at in arrived if outage.began + LEASE_S + SLACK_S < at < outage.ended]


async def test_no_model_call_starts_once_the_lease_is_in_doubt(outage: Outage) -> None:
    """The node that calls it writes nothing in between: only the lease holds it. Red without the look at the lease; and
    when it does not go on afterwards, or calls anew."""
    first, last = outage.began + LEASE_S + SLACK_S, outage.ended
    assert [at for at in outage.calls if first < at < last] == []
    assert len(outage.calls) == CALLS


async def test_submits_are_refused_and_told_when_to_come_back(outage: Outage) -> None:
    """503 with Retry-After. Red when a request hangs with the database: those of the first sixth must not outlast it."""
    assert {answer.status for answer in outage.submits if answer.ended < outage.ended} == {503}
    assert {answer.retry_after for answer in outage.submits if answer.status == 503} == {"1"}
    early = [a for a in outage.submits if a.at < outage.began + (outage.ended - outage.began) / 6]
    assert all(answer.ended < outage.ended for answer in early)


async def test_a_submit_that_is_sent_again_is_accepted_once(outage: Outage) -> None:
    """Whether its first answer was an error or not. Red when a statement that was given up is carried out beside it."""
    assert set(outage.accepted) == {"success"}
    assert [count for _, count in outage.made] == [1] * len(outage.submits)


async def test_a_cancel_is_refused_and_works_afterwards(outage: Outage) -> None:
    """Red when it is acknowledged without being committed."""
    assert outage.cancel.status == 503
    assert outage.cancelled == "interrupted"
