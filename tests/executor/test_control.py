"""What an executor does with its slots when nobody tells it anything: no ring and no permit."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, LiteralString
from unittest.mock import patch

import psycopg
import pytest
from redis.asyncio import Redis

from sandfleet.fleet.executor import control
from sandfleet.fleet.executor.control import Executor
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import new_id
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.submission import submit
from sandfleet.shared.templates import read_templates
from tests.executor.test_execution import State, graph_of, step
from tests.gates.test_gates import pool, submission
from tests.waiting import eventually

__all__ = ["pool"]


@asynccontextmanager
async def executing(
    database: str,
    redis_url: str,
    slots: int,
    node: Any = step,
    drain_grace_s: float = 0.0,
    suspects: str | None = None,
) -> AsyncIterator[Executor]:
    """An executor of this process, which has no queue and tops none up."""
    async with Redis.from_url(redis_url) as redis:
        await redis.flushdb()  # an executor that leaves rings
    settings = Settings(database_url=database, redis_url=redis_url, slots=slots, drain_grace_s=drain_grace_s)
    graphs = {"g": Graph("g", graph_of(node))}
    made = Executor(settings, graphs, read_templates(settings), suspects=suspects)
    with patch.object(control, "TOP_UP_EVERY_S", 3600.0):
        running = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            made.drain()
            await running


async def submit_some(pool: Pool) -> None:
    """Five runs, of which nobody is told."""
    for _ in range(5):
        await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))


async def number(pool: Pool, query: LiteralString) -> int:
    async with pool.connection() as connection:
        cursor = await connection.execute(query)
        row = await cursor.fetchone()
    return int(row[0]) if row is not None else 0


async def all_ended(pool: Pool) -> bool:
    return await number(pool, "select count(*) from runs where status = 'success'") == 5


async def retiring(pool: Pool, until: str | None) -> int:
    """Executors that are told to take nothing until then."""
    async with pool.connection() as connection:
        cursor = await connection.execute("update executors set retiring_until = %s", (until,))
    return cursor.rowcount


async def beaten(pool: Pool) -> None:
    """Return when the executor has beaten again."""
    before = await number(pool, "select extract(epoch from max(heartbeat_at)) * 1000000 from executors")
    await eventually(
        lambda: number(
            pool,
            f"select count(*) from executors where extract(epoch from heartbeat_at) * 1000000 > {before + 1}",  # type: ignore[arg-type]
        ),
        what="a beat",
    )


async def moved_to(pool: Pool, vtime: int) -> bool:
    return await number(pool, "select max(v) from vclock") == vtime


async def test_a_slot_that_frees_takes_a_run_that_had_found_none(
    pool: Pool, database: str, redis_url: str
) -> None:
    """Red when an executor that was full forgets that there may have been more: nobody would tell it again."""
    await submit_some(pool)
    async with executing(database, redis_url, slots=2):
        await eventually(lambda: all_ended(pool), what="the runs' end")


async def test_an_executor_with_room_does_not_ask_again_when_a_run_ends(
    pool: Pool, database: str, redis_url: str
) -> None:
    """It has seen that nothing was ready, and what comes rings. Red when each end of a run costs a claim."""
    await submit_some(pool)
    async with executing(database, redis_url, slots=20) as executor:
        await eventually(lambda: all_ended(pool), what="the runs' end")
        await eventually(lambda: not len(executor._held), what="free slots")
    assert executor._claims == 1


async def test_virtual_time_moves_on_with_what_is_claimed(pool: Pool, database: str, redis_url: str) -> None:
    """Red when the clock stands still: a tenant that comes later would be served before all that wait already."""
    await submit_some(pool)
    newest = await number(pool, "select max(vtime) from runs")
    async with executing(database, redis_url, slots=2):
        await eventually(lambda: moved_to(pool, newest), what="the clock's way")


@pytest.mark.parametrize("woken", [True, False], ids=["woken meanwhile", "not woken"])
async def test_an_executor_that_is_one_too_many_takes_nothing_until_it_is_needed(
    pool: Pool, database: str, redis_url: str, caplog: pytest.LogCaptureFixture, woken: bool
) -> None:
    """The scaler says so in the database. Red when it claims, or does not claim again when it is told so: nobody
    rings then."""
    caplog.set_level("INFO", "sandfleet.fleet.executor.control")
    async with pool.connection() as connection:
        await connection.execute("truncate executors")
    with patch.object(control, "_HEARTBEAT_EVERY_S", 0.05):
        async with executing(database, redis_url, slots=8) as executor:
            await eventually(lambda: retiring(pool, "infinity"), what="its first beat")
            await eventually(lambda: "takes no more runs" in caplog.text, what="its knowledge")
            await submit_some(pool)
            if woken:
                executor._claim_now.set()  # as a sweep does
            for _ in range(5):
                await beaten(pool)
            assert await number(pool, "select count(*) from runs where attempt > 0") == 0
            await retiring(pool, None)
            await eventually(lambda: all_ended(pool), what="the runs' end")


async def test_an_executor_that_drains_says_so_while_its_runs_go_on(
    pool: Pool, database: str, redis_url: str
) -> None:
    """The scaler would count it else, and retire the one that replaces it. Red when a drain shows only at its end."""
    let_go = threading.Event()

    async def waits(state: State) -> State:
        while not let_go.is_set():
            await asyncio.sleep(0.01)
        return await step(state)

    async with pool.connection() as connection:
        await connection.execute("truncate executors")
    await submit_some(pool)
    with patch.object(control, "_HEARTBEAT_EVERY_S", 0.05):
        async with executing(database, redis_url, slots=8, node=waits, drain_grace_s=600.0) as executor:
            try:
                busy = "select count(*) from executors where busy = 5"
                await eventually(lambda: number(pool, busy), what="its runs")
                assert await number(pool, "select count(retiring_until) from executors") == 0
                executor.drain()
                draining: LiteralString = f"{busy} and retiring_until = 'infinity'"
                await eventually(lambda: number(pool, draining), what="its word")
            finally:
                let_go.set()
            await eventually(lambda: all_ended(pool), what="the runs' end")


async def test_no_suspect_is_begun_beside_the_graph_of_one_that_was_lost(
    pool: Pool, database: str, redis_url: str
) -> None:
    """Its lease ran out while the process was frozen, say, and it goes on in a process that has others: if it kills that, the
    one beside it must not be blamed. Red when lost runs do not count."""
    began, go_on = threading.Event(), threading.Event()

    async def does_not_stop(state: State) -> State:
        began.set()
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return await step(state)

    async def submit_suspect() -> None:
        await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))
        await number(
            pool,
            "with u as (update runs set deaths = 4 where attempt = 0 returning 1) select count(*) from u",
        )

    await submit_suspect()
    async with executing(database, redis_url, slots=8, node=does_not_stop, suspects="own") as executor:
        await eventually(began.is_set, what="the first one's begin")
        lost = "with u as (update runs set attempt = attempt + 1, lease_owner = 'other' returning 1) select count(*) from u"
        assert await number(pool, lost) == 1
        await eventually(lambda: not executor._held.all_ours(), what="the executor's knowledge of the loss")
        await submit_suspect()
        for _ in range(10):
            executor._claim_now.set()
            await eventually(lambda: not executor._claim_now.is_set(), what="a look for the next one")
        assert await number(pool, "select count(*) from runs where attempt = 0") == 1
        go_on.set()
        await eventually(
            lambda: number(pool, "select count(*) from runs where status = 'success'"),
            what="the next one's end",
        )


@pytest.mark.parametrize("then", ["drains", "takes nothing"])
async def test_what_a_claim_took_whose_reply_was_lost_is_given_back(
    pool: Pool, database: str, redis_url: str, then: str
) -> None:
    """Nobody renews it, and that is no death. Red when only the next claim looks for it, which does not come while an
    executor drains, or a graph holds its loop."""
    await submit(pool, replace(submission("flood", new_id()), kwargs='{"input": {}}'))
    claimed, losing = control.claim, True

    async def loses(*given: Any, **options: Any) -> Any:
        nonlocal losing
        runs = await claimed(*given, **options)
        if not (runs and losing):
            return runs
        losing = False
        if then == "drains":
            executor.drain()
        else:
            executor._retiring = True
            executor._takes_runs.clear()
        raise psycopg.OperationalError("The reply was lost.")

    given_back: LiteralString = "select count(*) from runs where status = 'pending' and attempt = 1 and deaths = 0 and lease_owner is null"
    with patch.object(control, "claim", loses), patch.object(control, "_HEARTBEAT_EVERY_S", 3600.0):
        async with executing(database, redis_url, slots=8) as executor:
            await eventually(lambda: not losing, what="a claim")
            if then == "takes nothing":
                await eventually(lambda: number(pool, given_back), what="the run's return")
    assert await number(pool, given_back) == 1
