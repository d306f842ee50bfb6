"""Ending or giving back a run from the control loop: only the attempt that holds it can."""

import asyncio

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import Ending, claim, end_attempt, finish, hand_over
from sandfleet.shared.store.submission import Submission, submit
from tests.waiting import eventually

OWNER = Owner("acme", "ann")
THREAD = new_id()


@pytest.fixture
async def connection(database):
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "truncate runs, threads, journal, checkpoints, api_keys, tenants, flows, vclock, executors cascade"
        )
        await create_key(connection, OWNER, "test")
        yield connection


@pytest.fixture
async def two_runs(database, connection):
    """The first of two runs on a thread, claimed; the second one waits for it."""
    async with open_pool(database, 2) as pool:
        for _ in range(2):
            key = RunKey(*OWNER, new_id())
            await submit(
                pool,
                Submission(key, THREAD, graph_assistant_id("g"), "g", "default", "{}", create_thread=True),
            )
    return await claimed(connection)


async def claimed(connection):
    (run,) = await claim(connection, "default", "me", 60.0, 1, longest_waiting=False, poison_limit=5)
    return run


async def rows(connection):
    cursor = await connection.execute("select r::text from runs r union all select t::text from threads t")
    return sorted(await cursor.fetchall())


async def test_a_superseded_executor_ends_and_gives_back_nothing(connection, two_runs):
    """Red when a run whose graph is stuck is ended by its id: it may be the successor's meanwhile."""
    await hand_over(connection, [two_runs.fence])
    successor = await claimed(connection)
    assert successor.fence == two_runs.fence._replace(attempt=2)
    before = await rows(connection)
    assert await end_attempt(connection, two_runs.fence, "interrupted", None) == (False, {})
    assert await hand_over(connection, [two_runs.fence]) == ([], set())
    assert await rows(connection) == before


async def test_a_run_that_was_given_back_is_not_ended(connection, two_runs):
    """Red when only the attempt is compared, which stays the same until the next claim."""
    await hand_over(connection, [two_runs.fence])
    before = await rows(connection)
    assert await end_attempt(connection, two_runs.fence, "interrupted", None) == (False, {})
    assert await rows(connection) == before


async def test_a_rollback_is_complete_before_the_next_run_of_the_thread_is_ready(
    database, connection, two_runs
):
    """Red when the run is erased after the transaction that lets the next one go: that would start from what vanishes."""
    await connection.execute(
        """insert into checkpoints (tenant, user_id, thread_id, ns, checkpoint_id, run_id, attempt, metadata, type, body)
           values (%s, %s, %s, '', 'c', %s, 1, '{}', 'json', '{}')""",
        (*OWNER, str(THREAD), two_runs.fence.key.run_id),
    )
    async with (
        await psycopg.AsyncConnection.connect(database) as holder,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as other,
    ):
        await holder.execute("select 1 from checkpoints for update")  # the rollback cannot be completed yet
        ending = asyncio.create_task(
            end_attempt(connection, two_runs.fence, "interrupted", None, rollback=True)
        )

        async def waits():
            cursor = await other.execute(
                "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%erase_run%'"
            )
            return await cursor.fetchone()

        await eventually(waits, what="the rollback's wait")
        assert await claim(other, "default", "you", 60.0, 1, longest_waiting=False, poison_limit=5) == []
        await holder.rollback()
        assert await ending == (True, {"default": 1})
    run = await claimed(connection)
    assert (run.fence.key != two_runs.fence.key, run.head_checkpoint_id) == (True, None)


@pytest.mark.parametrize("rollback", [False, True])
async def test_an_end_whose_reply_was_lost_is_known_and_whoever_waits_is_woken(
    connection, two_runs, rollback
):
    """Red when only the call that ends the run says whose turn it is: the run that waited for the thread would wait for a
    long poll; or when one that is erased counts as another attempt's, since it is gone: nobody would tell its watchers."""
    await connection.execute(
        "insert into executors (executor_id, pool, slots, busy) values ('me', 'default', 2, 0)"
    )
    ending = Ending("interrupted", '[[1, "end", "null"]]', rollback=rollback)
    assert await finish(connection, two_runs.fence, ending) == (True, {"default": 1})
    assert await finish(connection, two_runs.fence, ending) == (True, {"default": 1})
    await claimed(connection)
    assert await finish(connection, two_runs.fence, ending) == (True, {})
