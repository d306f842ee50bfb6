"""Cancelling with descendants, and what a new run does to those on its thread, under concurrent calls."""

import asyncio

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.errors import Conflict, NotFound
from sandfleet.shared.ids import Owner, RunKey, new_id
from sandfleet.shared.invariants.runs import check_runs
from sandfleet.shared.store import runs, threads
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import Ending, claim, finish
from sandfleet.shared.store.submission import submit
from tests.gates.test_gates import submission
from tests.waiting import eventually

OWNER = Owner("a", "u")


@pytest.fixture
async def pool(database):
    pool = open_pool(database, 12)
    await pool.open()
    async with pool.connection() as connection:
        await connection.execute(
            "truncate runs, threads, journal, tool_calls, checkpoints, api_keys, tenants, flows, vclock cascade"
        )
        for tenant in ("a", "b"):
            await create_key(connection, Owner(tenant, "u"), "test")
    yield pool
    async with pool.connection() as connection:
        assert (await check_runs(connection)).violations == []
    await pool.close()


async def accept(pool, parent=None, thread=None, **given):
    return (await submit(pool, submission("a", thread or new_id(), parent_run=parent, **given))).run_id


async def claimed(pool, count):
    async with pool.connection() as connection:
        return await claim(connection, "default", "x", 60, count, longest_waiting=False)


async def end(pool, run, status="success"):
    async with pool.connection() as connection:
        return await finish(connection, run.fence, Ending(status, '[[0, "end", "null"]]'))


async def standing(pool, *run_ids):
    """Status, or the requested cancel action, of each run; None for one that is gone."""
    async with pool.connection() as connection:
        cursor = await connection.execute("select run_id, coalesce(cancel_action, status) from runs")
        found = dict(await cursor.fetchall())
    return [found.get(run_id) for run_id in run_ids]


async def family(pool):
    """A running root with a running child, an ended child that has a waiting child, and a delayed one; and a stranger."""
    root = await accept(pool)
    await claimed(pool, 1)
    running = await accept(pool, root)
    await claimed(pool, 1)
    ended = await accept(pool, root)
    (of_ended,) = await claimed(pool, 1)
    ready = await accept(pool, ended)
    await end(pool, of_ended)
    delayed = await accept(pool, running, delay_s=600)
    stranger = await accept(pool)
    return root, running, ended, ready, delayed, stranger


async def test_cancelling_a_run_cancels_all_its_descendants(pool):
    """Also through one that is over. Red when only children are found, or the family's others are touched."""
    family_ids = await family(pool)
    cancelled = await request_cancel(pool, RunKey(*OWNER, family_ids[0]), "interrupt")
    assert await standing(pool, *family_ids) == [
        "interrupt",
        "interrupt",
        "success",
        "interrupted",
        "interrupted",
        "pending",
    ]
    assert cancelled.stop == {family_ids[0]: "interrupt", family_ids[1]: "interrupt"}
    assert set(cancelled.ended) == {family_ids[3], family_ids[4]}


async def test_rolling_a_run_back_interrupts_its_descendants(pool):
    """Red when the children's work vanishes with the parent's."""
    root, running, *_ = await family(pool)
    cancelled = await request_cancel(pool, RunKey(*OWNER, root), "rollback")
    assert cancelled.stop == {root: "rollback", running: "interrupt"}


@pytest.mark.parametrize("status", ["success", "error", "timeout"])
async def test_a_parent_that_ends_by_itself_leaves_its_children_alone(pool, status):
    """Red when a failure cascades."""
    root = await accept(pool)
    (parent,) = await claimed(pool, 1)
    child = await accept(pool, root)
    await end(pool, parent, status)
    assert await standing(pool, child) == ["pending"]


@pytest.mark.parametrize("way", ["delete run", "delete thread", "interrupt", "rollback"])
async def test_every_way_to_end_a_run_from_outside_takes_its_children_along(pool, way):
    """Red when one of them forgets the cascade."""
    thread = new_id()
    root = await accept(pool, thread=thread)
    await claimed(pool, 1)
    child = await accept(pool, root)
    await claimed(pool, 1)
    if way == "delete run":
        told = await runs.delete(pool, OWNER, thread, root)
    elif way == "delete thread":
        told = await threads.delete(pool, OWNER, thread)
    else:
        told = await submit(pool, submission("a", thread, strategy=way))
    assert await standing(pool, child) == ["interrupt"]
    assert told.stop[child] == "interrupt"
    assert root in told.stop


async def test_a_child_needs_a_parent_that_goes_on(pool):
    """Of the same tenant and user. Red when a run can be a child of a foreign, an unknown, an ended or a cancelled one:
    nobody would cancel it."""
    with pytest.raises(NotFound):
        await accept(pool, new_id())
    foreign = (await submit(pool, submission("b", new_id()))).run_id
    with pytest.raises(NotFound):
        await accept(pool, foreign)
    await claimed(pool, 1)
    root = await accept(pool)
    (run,) = await claimed(pool, 1)
    await request_cancel(pool, RunKey(*OWNER, root), "interrupt")
    with pytest.raises(Conflict):
        await accept(pool, root)
    await end(pool, run, "interrupted")
    with pytest.raises(Conflict):
        await accept(pool, root)


async def test_no_child_slips_past_the_cancellation_of_its_parent(pool):
    """Red when submission and cancellation do not exclude each other: a child would live on without anybody to end it."""
    for _ in range(10):
        root = await accept(pool)
        (run,) = await claimed(pool, 1)

        async def child(root=root):
            try:
                return await accept(pool, root)
            except Conflict:
                return None

        *children, _ = await asyncio.gather(
            *(child() for _ in range(6)), request_cancel(pool, RunKey(*OWNER, root), "interrupt")
        )
        assert set(await standing(pool, *filter(None, children))) <= {"interrupted"}
        await end(pool, run, "interrupted")


async def test_cancelling_a_family_and_renewing_its_leases_never_deadlocks(pool, database):
    """Red when the cascade locks runs in another order than the renewal, which goes by id: here it stops half-way."""
    family_ids = [await accept(pool)]
    await claimed(pool, 1)
    for _ in range(4):
        family_ids.append(await accept(pool, family_ids[0]))
        await claimed(pool, 1)
    lock = "select 1 from runs where run_id = %s for update"
    async with await psycopg.AsyncConnection.connect(database) as renewing:
        await renewing.execute(lock, (min(family_ids),))
        cancelling = asyncio.create_task(request_cancel(pool, RunKey(*OWNER, family_ids[0]), "interrupt"))

        async def waits():
            async with pool.connection() as connection:
                cursor = await connection.execute(
                    "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%cancel_runs%'"
                )
                return await cursor.fetchone()

        await eventually(waits, 30, "the cancel at a lock")
        await renewing.execute(lock, (max(family_ids),))
        await renewing.commit()
    assert set((await cancelling).stop) == set(family_ids)


async def test_reject_lets_one_of_many_have_the_thread(pool):
    """Red when two runs are accepted on it."""
    thread = new_id()
    answers = await asyncio.gather(
        *(submit(pool, submission("a", thread, strategy="reject")) for _ in range(12)), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["Accepted"] + ["Conflict"] * 11


async def test_reject_minds_a_run_that_waits_for_its_time(pool):
    """The thread is busy with it, as its status says. Red when only the run that holds the thread counts."""
    thread = new_id()
    await accept(pool, thread=thread, delay_s=600)
    with pytest.raises(Conflict):
        await accept(pool, thread=thread, strategy="reject")


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_the_newest_run_takes_the_thread_from_all_others(pool, strategy):
    """However many come at once: one is left to run after the one that must stop. Red when a run that waits for the
    thread, or has not begun, is passed over and executed all the same."""
    thread = new_id()
    first = await accept(pool, thread=thread)
    (running,) = await claimed(pool, 1)
    waiting = [await accept(pool, thread=thread) for _ in range(3)]
    answers = await asyncio.gather(
        *(submit(pool, submission("a", thread, strategy=strategy)) for _ in range(10))
    )
    gone = "interrupted" if strategy == "interrupt" else None
    assert await standing(pool, first, *waiting) == [strategy, gone, gone, gone]
    states = await standing(pool, *(answer.run_id for answer in answers))
    assert sorted(states, key=str) == sorted([gone] * 9 + ["pending"], key=str)
    assert await claimed(pool, 9) == []
    await end(pool, running, "interrupted")
    (last,) = await claimed(pool, 9)
    assert states[[answer.run_id for answer in answers].index(last.fence.key.run_id)] == "pending"


async def test_slots_that_an_interrupted_run_frees_are_reported(pool):
    """Red when nobody is woken for the run that got the slot of a ready run that a new one has ended."""
    async with pool.connection() as connection:
        await connection.execute("update tenants set max_in_flight = 1")
    thread = new_id()
    await accept(pool, thread=thread)
    other = await accept(pool)
    accepted = await submit(pool, submission("a", thread, strategy="interrupt"))
    assert (accepted.gate, accepted.ready, accepted.stop) == ("tenant", {"default": 1}, {})
    (run,) = await claimed(pool, 9)
    assert run.fence.key.run_id == other
