"""Runs that lost their executors: which of them killed it, and where each goes on from."""

import asyncio
import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import Ending, claim, finish, hand_over
from sandfleet.shared.store.submission import Submission, submit
from sandfleet.shared.store.suspects import killed, suspects_wait
from sandfleet.shared.store.sweep import sweep
from tests.waiting import eventually

OWNER = Owner("acme", "ann")
LIMIT = 5


@pytest.fixture
async def pool(database):
    async with open_pool(database, 4) as pool:
        async with pool.connection() as connection:
            await connection.execute(
                "truncate runs, threads, journal, checkpoints, api_keys, tenants, flows, vclock cascade"
            )
            await connection.execute("update turns set due_at = default")
            await create_key(connection, OWNER, "test")
        yield pool


@pytest.fixture
async def connection(database):
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        yield connection


async def submitted(pool, count):
    """Ids of this many new runs."""
    return [
        (
            await submit(
                pool,
                Submission(
                    RunKey(*OWNER, new_id()),
                    new_id(),
                    graph_assistant_id("g"),
                    "g",
                    "default",
                    "{}",
                    create_thread=True,
                ),
            )
        ).run_id
        for _ in range(count)
    ]


async def claimed(connection, owner, limit, lease_s=60.0, *, suspects=False):
    return await claim(
        connection,
        "default",
        owner,
        lease_s,
        limit,
        longest_waiting=False,
        poison_limit=LIMIT,
        suspects=suspects,
    )


async def write_checkpoint(connection, run):
    await connection.execute(
        """insert into checkpoints (tenant, user_id, thread_id, ns, checkpoint_id, run_id, attempt, metadata, type, body)
           values (%s, %s, %s, '', %s, %s, %s, %s, 'json', '{}')""",
        (*OWNER, str(run.thread_id), uuid.uuid4().hex, run.fence.key.run_id, run.fence.attempt, Jsonb({})),
    )


async def suspects(pool, connection, count):
    """Ids of runs that one more death ends."""
    ids = await submitted(pool, count)
    await connection.execute("update runs set deaths = %s where run_id = any(%s)", (LIMIT - 1, ids))
    return ids


async def test_suspects_go_one_at_a_time_to_who_asks_for_nothing_else(pool, connection):
    """Red when a suspect is claimed beside other runs, any of which may kill it, or beside another suspect."""
    ids = await suspects(pool, connection, 3)
    fresh = await submitted(pool, 4)
    assert {run.fence.key.run_id for run in await claimed(connection, "a", 64)} == set(fresh)
    assert await claimed(connection, "a", 64) == []
    (first,) = await claimed(connection, "b", 64, suspects=True)
    assert await claimed(connection, "b", 64, suspects=True) == []
    (second,) = await claimed(connection, "c", 64, suspects=True)
    assert {run.fence.key.run_id for run in (first, second)} < set(ids)


async def test_the_next_suspect_comes_when_the_last_one_has_written_a_checkpoint_or_is_over(pool, connection):
    """Red when a run counts as a suspect for ever: the others would wait for as long as it runs."""
    await suspects(pool, connection, 3)
    (first,) = await claimed(connection, "a", 64, suspects=True)
    await write_checkpoint(connection, first)
    (second,) = await claimed(connection, "a", 64, suspects=True)
    assert await claimed(connection, "a", 64, suspects=True) == []
    await finish(connection, second.fence, Ending("success", '[[0, "end", "null"]]'))
    assert len(await claimed(connection, "a", 64, suspects=True)) == 1


async def error_of(connection, run_id):
    cursor = await connection.execute("select status, error->>'error' from runs where run_id = %s", (run_id,))
    return await cursor.fetchone()


async def test_a_suspect_ends_when_it_was_seen_to_kill_the_process_that_it_had_for_itself(pool, connection):
    """Red when it goes on killing, waits for its lease to run out, or somebody else is blamed."""
    await suspects(pool, connection, 2)
    (guilty,) = await claimed(connection, "a", 64, suspects=True)
    (other,) = await claimed(connection, "b", 64, suspects=True)
    assert await killed(connection, "a", LIMIT) == 1
    await connection.execute("update pulse set steady_since = '-infinity'")
    await sweep(connection, LIMIT, 0, 3600)
    assert await error_of(connection, guilty.fence.key.run_id) == ("error", "ExecutorLost")
    assert await error_of(connection, other.fence.key.run_id) == ("running", None)


async def test_what_has_written_a_checkpoint_there_is_not_blamed(pool, connection):
    """Red when all that the process ran are taken for those who killed it."""
    await suspects(pool, connection, 1)
    (run,) = await claimed(connection, "a", 64, suspects=True)
    await write_checkpoint(connection, run)
    assert await killed(connection, "a", LIMIT) == 0


async def test_a_lease_that_ran_out_is_no_proof(pool, connection):
    """Whoever held it may have been frozen, or starved. Red when a suspect ends by that, and when it never does."""
    (run_id,) = await suspects(pool, connection, 1)
    for _ in range(LIMIT):
        assert len(await claimed(connection, "a", 64, lease_s=-1, suspects=True)) == 1
        await sweep(connection, LIMIT, 0, 3600)
        assert await error_of(connection, run_id) == ("pending", None)
    await claimed(connection, "a", 64, lease_s=-1, suspects=True)
    await sweep(connection, LIMIT, 0, 3600)
    assert await error_of(connection, run_id) == ("error", "ExecutorLost")


async def test_one_executor_at_a_time_starts_a_process_for_suspects(pool, connection):
    """Red when none does, or each of them."""
    assert not await suspects_wait(connection, "default", LIMIT)
    await suspects(pool, connection, 3)
    assert not await suspects_wait(connection, "hosts", LIMIT)
    assert await suspects_wait(connection, "default", LIMIT)
    assert not await suspects_wait(connection, "default", LIMIT)


async def test_runs_that_may_die_once_more_are_claimed_together(pool, connection):
    """Red when runs are set apart too early: whatever waits long for a model would go on one by one after a few deaths."""
    ids = await suspects(pool, connection, 10)
    await connection.execute("update runs set deaths = %s where run_id = any(%s)", (LIMIT - 2, ids))
    assert len(await claimed(connection, "a", 64)) == 10


async def test_runs_that_kill_their_executor_take_no_other_run_with_them(pool, connection):
    """The executor dies as soon as it has begun a poisonous run, before any run beside it has come to a checkpoint, and
    new ones keep coming. Red when those are claimed with it again and again, since all of them reach the limit together,
    and when one that has come near the limit beside the first is claimed beside the next."""
    poison: set[uuid.UUID] = set()
    others: list[uuid.UUID] = []
    for life in range(1_000):
        if life % 4 == 0 and len(poison) < 5:
            poison.update(await submitted(pool, 1))
            others += await submitted(pool, 10)
        runs = await claimed(connection, f"executor-{life}", 64, lease_s=-1)
        alone = await claimed(connection, f"suspects-{life}", 64, lease_s=-1, suspects=True)
        if not runs and not alone and len(poison) == 5:
            break
        for process in (runs, alone):
            if not poison & {run.fence.key.run_id for run in process}:
                for run in process:
                    await finish(connection, run.fence, Ending("success", '[[0, "end", "null"]]'))
        await killed(connection, f"suspects-{life}", LIMIT)
        await sweep(connection, LIMIT, 0, 3600)
    cursor = await connection.execute("select run_id, error->>'error' from runs where status = 'error'")
    assert set(await cursor.fetchall()) == {(run, "ExecutorLost") for run in poison}
    cursor = await connection.execute("select count(*) from runs where status = 'success'")
    assert await cursor.fetchone() == (len(others),)


async def test_a_claim_sees_all_that_was_committed_before_it(pool, connection, database):
    """A run is claimed, writes its first checkpoint and is handed over while another executor's claim has just begun and
    waits for a lock. Red when that reads the checkpoints as they were at its begin: the run would start anew."""
    await submitted(pool, 1)
    (run,) = await claimed(connection, "a", 1)
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as other:
        async with connection.transaction():
            await connection.execute("lock table runs in exclusive mode")
            claiming = asyncio.create_task(claimed(other, "b", 1))

            async def waits():
                cursor = await connection.execute(
                    "select 1 from pg_locks where pid = %s and not granted", (other.info.backend_pid,)
                )
                return await cursor.fetchone()

            await eventually(waits, 20, "the claim waits")
            await write_checkpoint(connection, run)
            await hand_over(connection, [run.fence])
        (successor,) = await claiming
    assert successor.fence.attempt == 2
    assert successor.resumes
    assert successor.head_checkpoint_id is not None
