"""Redis and SQS hang for 30 s, both at once; then Redis is emptied, and killed, under a run that streams.

PostgreSQL is the only authority, so nothing that clients rely on needs the other two. Recorded from all sides at once.
"""

import asyncio
import json
import signal
import time
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from tests.faults.fleet import ENDS_WITHIN_S, Answer, Fleet
from tests.faults.view import View
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

pytestmark = pytest.mark.long

AWAY_S = 30.0
STEPS = 150
SUBMITTED_STEPS = 3
WORDS = 300


@dataclass
class Outage:
    """What was seen of the outage, which lasted from ``began`` to ``ended`` (`time.monotonic`)."""

    began: float
    ended: float
    rows: dict[str, tuple[str, int, int]]
    """Status, attempt and deaths, at the end, of the runs that nobody cancelled."""
    views: dict[str, View]
    journals: dict[str, list[tuple[int, int, str]]]
    counter: View
    tokens: View
    digest: int
    submits: list[Answer]
    early: list[str]
    """Status that the runs of the first half had when the outage ended."""
    waited: Answer
    waited_enough: bool
    """Whether the request that waits for a run was answered before the outage ended."""
    cancel: Answer
    cancelled: str
    """Status that the cancelled run had when the outage ended."""
    processes: tuple[dict[str, int], dict[str, int]]


async def stream_tokens(fleet: Fleet, chunk_chars: int) -> str:
    """A run that a model writes to, once the first words are there."""
    script = json.dumps({"words": WORDS, "chunk_chars": chunk_chars, "chunk_delay_ms": 100})
    prompt = {"messages": [{"role": "user", "content": f"hi #script:{script}"}]}
    run_id = await fleet.begin("messages", prompt, stream_mode="messages-tuple")
    await eventually(lambda: len(fleet.views[run_id].events) > 3, ENDS_WITHIN_S, "tokens")
    return run_id


@pytest.fixture(scope="module")
async def outage(fleet: Fleet) -> Outage:
    counter = await fleet.begin("counter", {"steps": STEPS, "delay_ms": 100}, stream_mode="updates")
    doomed = await fleet.begin("slow", {"seconds": 120, "piece_ms": 200}, stream_mode="custom")
    tokens = await stream_tokens(fleet, 5)
    await eventually(lambda: len(fleet.views[counter].events) > 3, 60, "steps")
    before = fleet.processes()
    began = time.monotonic()
    async with fleet.frozen("redis", "ministack"):
        waiting = asyncio.create_task(
            fleet.post("/runs/wait", {"assistant_id": "counter", "input": {"steps": SUBMITTED_STEPS}})
        )
        doomed_path = f"/threads/{fleet.views[doomed].thread_id}/runs/{doomed}/cancel"
        cancelling = asyncio.create_task(fleet.post(doomed_path, None))
        submitting = []
        while (left := began + AWAY_S - time.monotonic()) > 0:
            submitting.append(asyncio.create_task(submit(fleet)))
            await asyncio.sleep(min(1.5, left))
        early = [each.result().body["run_id"] for each in submitting[: len(submitting) // 2] if each.done()]
        then = [(await fleet.row(run_id))[0] for run_id in early]
        waited = waiting.done()
        cancelled = (await fleet.row(doomed))[0]
        ended = time.monotonic()
    submits = await asyncio.gather(*submitting)
    for answer in submits:
        fleet.follow(answer.body["thread_id"], answer.body["run_id"])
    runs = [counter, doomed, tokens, *(answer.body["run_id"] for answer in submits)]
    views = {run_id: await fleet.seen(run_id) for run_id in runs}
    return Outage(
        began=began,
        ended=ended,
        rows={run_id: await fleet.row(run_id) for run_id in runs if run_id != doomed},
        views=views,
        journals={run_id: await fleet.journal(run_id) for run_id in views},
        counter=views[counter],
        tokens=views[tokens],
        digest=(await fleet.values(counter))["digest"],
        submits=submits,
        early=then,
        waited=await waiting,
        waited_enough=waited,
        cancel=await cancelling,
        cancelled=cancelled,
        processes=(before, fleet.processes()),
    )


async def submit(fleet: Fleet) -> Answer:
    body = {
        "assistant_id": "counter",
        "input": {"steps": SUBMITTED_STEPS},
        "stream_mode": "updates",
        "on_completion": "keep",
    }
    return await fleet.post("/runs", body)


async def test_submits_are_accepted_as_on_any_day(outage: Outage) -> None:
    """Red when a submit waits for a ring or a permit: the last ones would be answered behind the outage."""
    assert {answer.status for answer in outage.submits} == {200}
    assert max(answer.took_s for answer in outage.submits) < AWAY_S / 6


async def test_runs_are_found_and_end_in_the_outage(outage: Outage) -> None:
    """Nobody is woken, so executors look on their own. Red when they look only on a ring or a permit, or when a poll that
    hangs keeps them from it."""
    assert len(outage.early) > 5
    assert set(outage.early) == {"success"}
    assert outage.waited_enough
    assert outage.waited.body["done"] == list(range(1, SUBMITTED_STEPS + 1))


async def test_a_cancel_is_acted_upon_in_the_outage(outage: Outage) -> None:
    """Its key is lost; PostgreSQL has it. Red when the executor looks at the keys only."""
    assert outage.cancel.status == 202
    assert outage.cancelled == "interrupted"


async def test_no_run_and_no_process_suffers(outage: Outage) -> None:
    """Red when an attempt is lost, or an error gets out of a loop."""
    assert set(outage.rows.values()) == {("success", 1, 0)}
    assert outage.digest == expected_digest(STEPS)
    before, after = outage.processes
    assert before == after


async def test_streams_stay_open_and_announce_what_they_miss(outage: Outage) -> None:
    """Journalled events once and in order; where token deltas are missing, one ``resync`` with the run's state."""
    for run_id, view in outage.views.items():
        assert view.faults(outage.journals[run_id]) == [], run_id
        assert view.breaks == 0
        assert all(data["run_id"] == run_id for data in view.data("resync"))


async def test_journalled_events_arrive_in_the_outage(outage: Outage) -> None:
    """Red when a stream waits for Redis, or an executor does before it journals."""
    arrived = [each.at for each in outage.counter.events if each.event == "updates"]
    assert len([at for at in arrived if outage.began + AWAY_S / 6 < at < outage.ended]) > 5


@pytest.mark.parametrize("loss", ["emptied", "killed"])
async def test_a_redis_that_forgets_costs_token_deltas_only(fleet: Fleet, loss: str) -> None:
    """The hole is announced once; what comes afterwards is live again, and the answer is whole. Red when an executor does
    not make the stream anew, or a reader believes an empty one."""
    before = fleet.processes()
    run_id = await stream_tokens(fleet, 25)
    view = fleet.views[run_id]
    if loss == "emptied":
        async with Redis.from_url(fleet.stack.info.redis_url) as redis:
            await redis.flushall()
    else:
        await fleet.stack.kill("redis", signal.SIGKILL)
        await fleet.stack.restart("redis")
    known = len(view.events)
    await eventually(lambda: len(view.events) > known + 20, ENDS_WITHIN_S, "tokens after the loss")
    await fleet.seen(run_id)
    assert view.faults(await fleet.journal(run_id)) == []
    assert view.names.count("messages") > known + 20
    assert view.breaks == 0
    assert await fleet.row(run_id) == ("success", 1, 0)
    text = (await fleet.values(run_id))["messages"][-1]["content"]
    assert text == " ".join(f"w{n}" for n in range(WORDS))
    assert fleet.processes() == before
