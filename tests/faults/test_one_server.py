"""One server alone is away, for as long as it takes to see that work goes on without it: SQS or Redis hang or refuse
connections. And PostgreSQL crashes under live runs."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.fleet import ENDS_WITHIN_S, Answer, Fleet
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

STEPS = 40
SUBMITTED_STEPS = 3


@asynccontextmanager
async def away(fleet: Fleet, server: str, how: str) -> AsyncIterator[None]:
    if how == "frozen":
        async with fleet.frozen(server):
            yield
        return
    await fleet.stop(server)
    try:
        yield
    finally:
        await fleet.stack.restart(server)


async def wait_for_one(fleet: Fleet) -> Answer:
    """Submit a run and wait for its outcome by one request."""
    return await fleet.post(
        "/runs/wait",
        {"assistant_id": "counter", "input": {"steps": SUBMITTED_STEPS}},
        timeout_s=ENDS_WITHIN_S,
    )


@pytest.mark.parametrize("how", ["frozen", "refusing"])
@pytest.mark.parametrize("server", ["ministack", "redis"])
async def test_runs_are_taken_done_and_cancelled_without_it(fleet: Fleet, server: str, how: str) -> None:
    """All of it while the server is away. Red when a submit waits for it, when nobody looks for runs without it, when a
    stream or a cancel depends on it, or when its errors end a process or cost an attempt."""
    before = fleet.processes()
    counter = await fleet.begin("counter", {"steps": STEPS, "delay_ms": 100}, stream_mode="updates")
    doomed = await fleet.begin("slow", {"seconds": 300, "piece_ms": 200}, stream_mode="custom")
    await eventually(lambda: min(len(fleet.views[each].events) for each in (counter, doomed)) > 2, 60, "both")
    async with away(fleet, server, how):
        seen = len(fleet.views[counter].events)
        path = f"/threads/{fleet.views[doomed].thread_id}/runs/{doomed}/cancel"
        cancel, *waited = await asyncio.gather(
            fleet.post(path, None), *(wait_for_one(fleet) for _ in range(4))
        )
        assert cancel.status == 202
        assert await fleet.over(doomed) == "interrupted"
        assert [answer.status for answer in waited] == [200] * 4
        assert [answer.body["digest"] for answer in waited] == [expected_digest(SUBMITTED_STEPS)] * 4
        await eventually(
            lambda: fleet.views[counter].events[seen:] or fleet.watching[counter].done(), 60, "an event"
        )
        assert await fleet.over(counter) == "success"
    for run_id in (counter, doomed):
        view = await fleet.seen(run_id)
        assert view.faults(await fleet.journal(run_id)) == []
        assert view.breaks == 0
    assert await fleet.row(counter) == ("success", 1, 0)
    assert (await fleet.values(counter))["digest"] == expected_digest(STEPS)
    assert fleet.processes() == before


async def test_a_crash_of_postgresql_costs_a_pause(fleet: Fleet) -> None:
    """SIGKILL, and recovery from its log. Red when what it had acknowledged is lost, when a lease expires because of the
    crash, when a connection that died with it ends a process, or when a step is done twice."""
    before = fleet.processes()
    counters = [
        await fleet.begin("counter", {"steps": STEPS, "delay_ms": 100}, stream_mode="updates") for _ in "abc"
    ]
    await eventually(lambda: min(len(fleet.views[each].events) for each in counters) > 2, 60, "all of them")
    await fleet.stack.kill("postgres", signal.SIGKILL)
    asked = await wait_for_one(fleet)
    await fleet.stack.restart("postgres")
    assert asked.status in (0, 503)
    for run_id in counters:
        view = await fleet.seen(run_id)
        assert view.faults(await fleet.journal(run_id)) == []
        assert view.breaks == 0
        assert await fleet.row(run_id) == ("success", 1, 0)
        assert (await fleet.values(run_id))["digest"] == expected_digest(STEPS)
    await fleet.well()
    assert fleet.processes() == before
