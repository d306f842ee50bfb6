"""Runs that end together: what they share, and what they must not."""

import asyncio
from dataclasses import replace

from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.shared.ids import Fence, new_id
from sandfleet.shared.store.claims import claim, finish_together
from sandfleet.shared.store.submission import submit
from tests.gates.test_gates import ending, pool, submission
from tests.waiting import eventually

__all__ = ["pool"]


async def claimed(pool, tenant, count):
    """Fences of ``count`` running runs of a tenant."""
    for _ in range(count):
        await submit(pool, submission(tenant, new_id()))
    async with pool.connection() as connection:
        runs = await claim(connection, "default", "x", 60, count, longest_waiting=False)
    return [run.fence for run in runs]


async def state(pool, fence):
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select status, xmin::text from runs where tenant = %s and user_id = %s and run_id = %s",
            fence.key,
        )
        return await cursor.fetchone()


async def waiting(pool, count):
    """Whether ``count`` terminal transactions wait for a tenant's row."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        return (await cursor.fetchone())[0] == count


async def test_runs_of_a_tenant_that_end_together_share_a_transaction(pool):
    """Red when each run is ended on its own: ten transactions, one after another, for the same row."""
    fences = await claimed(pool, "flood", 10)
    finisher = Finisher(pool)
    async with pool.connection() as blocker, blocker.transaction():
        await blocker.execute("select 1 from tenants where tenant = 'flood' for update")
        ends = [asyncio.ensure_future(finisher.finish(fence, ending("success"))) for fence in fences]
        await eventually(lambda: waiting(pool, 1))
    assert await asyncio.gather(*ends) == [(True, {})] * 10
    states = [await state(pool, fence) for fence in fences]
    assert {status for status, _ in states} == {"success"}
    assert len({transaction for _, transaction in states}) <= 2


async def test_a_tenant_whose_row_is_locked_holds_up_no_other_tenant(pool):
    """Red when all tenants share one queue, or one transaction."""
    (slow,), (quick,) = await claimed(pool, "flood", 1), await claimed(pool, "other", 1)
    finisher = Finisher(pool)
    async with pool.connection() as blocker, blocker.transaction():
        await blocker.execute("select 1 from tenants where tenant = 'flood' for update")
        held_up = asyncio.ensure_future(finisher.finish(slow, ending("success")))
        await eventually(lambda: waiting(pool, 1))
        assert await finisher.finish(quick, ending("success")) == (True, {})
        assert not held_up.done()
    assert await held_up == (True, {})


async def test_an_ending_that_postgresql_refuses_keeps_no_other_run_from_ending(pool):
    """Red when a transaction that fails fails for all its runs."""
    first, *fences = await claimed(pool, "flood", 4)
    endings = [replace(ending("success"), output="no JSON"), ending("success"), ending("error")]
    finisher = Finisher(pool)
    async with pool.connection() as blocker, blocker.transaction():
        await blocker.execute("select 1 from tenants where tenant = 'flood' for update")
        ends = [asyncio.ensure_future(finisher.finish(first, ending("success")))]
        ends += [asyncio.ensure_future(finisher.finish(f, e)) for f, e in zip(fences, endings, strict=True)]
        await eventually(lambda: waiting(pool, 1))
    _, refused, *good = await asyncio.gather(*ends, return_exceptions=True)
    assert isinstance(refused, Exception)
    assert good == [(True, {})] * 2
    assert [(await state(pool, fence))[0] for fence in fences] == ["running", "success", "error"]


async def test_each_run_gets_its_own_answer(pool):
    """Red when answers are given in the order of the rows, which are sorted by their keys, and not of the callers."""
    first, *fences = await claimed(pool, "flood", 5)
    fences.reverse()
    stale = Fence(fences[0].key, fences[0].attempt - 1)
    finisher = Finisher(pool)
    async with pool.connection() as blocker, blocker.transaction():
        await blocker.execute("select 1 from tenants where tenant = 'flood' for update")
        ends = [
            asyncio.ensure_future(finisher.finish(fence, ending("success")))
            for fence in (first, stale, *fences[1:])
        ]
        await eventually(lambda: waiting(pool, 1))
    assert [mine for mine, _ in await asyncio.gather(*ends)] == [True, False, True, True, True]
    assert (await state(pool, fences[0]))[0] == "running"


async def test_runs_that_end_together_are_locked_in_the_order_of_their_keys(pool):
    """As every statement locks several runs. Red when they are locked as they come: a writer that holds the first and
    waits for the second, which the ends hold, would never get it."""
    fences = sorted(await claimed(pool, "flood", 3), key=lambda fence: fence.key)
    async with pool.connection() as writer, writer.transaction():
        await writer.execute("select 1 from runs where run_id = %s for share", (fences[0].key.run_id,))
        async with pool.connection() as connection:
            ends = asyncio.ensure_future(
                finish_together(connection, [(fence, ending("success")) for fence in reversed(fences)])
            )
            await eventually(lambda: waiting(pool, 1))
            for fence in fences[1:]:
                await writer.execute(
                    "select 1 from runs where run_id = %s for share nowait", (fence.key.run_id,)
                )
            await writer.execute("rollback")
            assert await ends == [(True, {})] * 3


async def test_a_run_that_is_rolled_back_vanishes(pool):
    """Red when the finisher ends it together with others, and leaves it there."""
    (fence,) = await claimed(pool, "flood", 1)
    assert await Finisher(pool).finish(fence, replace(ending("interrupted"), rollback=True)) == (True, {})
    assert await state(pool, fence) is None


async def test_ending_a_run_again_is_safe(pool):
    """Red when an attempt does not recognise the end that it made itself: after a lost reply it would give the run up."""
    (fence,) = await claimed(pool, "flood", 1)
    for _ in range(2):
        assert await Finisher(pool).finish(fence, ending("success")) == (True, {})
