"""The sweep: what it ends, returns, releases and forgets, in many copies at once, and in nobody's way."""

import asyncio
import time

import psycopg
import pytest

from sandfleet.shared import top_up
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, new_id
from sandfleet.shared.invariants.runs import check_runs
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import claim, finish, hand_over, renew
from sandfleet.shared.store.submission import submit, submit_on
from sandfleet.shared.store.sweep import set_limits, sweep
from sandfleet.shared.store.turns import take_sweep_turn, take_turn
from tests.gates.test_gates import ending, submission
from tests.waiting import eventually

LEASE_S = 0.0  # the database counts as having been up for long: an expired lease is returned at once
LONG_S = 10**6


@pytest.fixture
async def pool(database, monkeypatch):
    monkeypatch.setattr("sandfleet.shared.store.sweep._PASS_S", 120.0)  # however slow the machine is
    pool = open_pool(database, 12)
    await pool.open()
    async with pool.connection() as connection:
        await connection.execute(
            "truncate runs, threads, journal, tool_calls, checkpoints, state_snapshots, executors, hosts, api_keys,"
            " tenants, flows, vclock, idempotency_keys, pulse cascade"
        )
        await connection.execute("update turns set due_at = '-infinity'")
        for tenant in ("a", "b"):
            await create_key(connection, Owner(tenant, "u"), "test")
    yield pool
    await pool.close()


async def sql(pool, statement, *values):
    async with pool.connection() as connection:
        cursor = await connection.execute(statement, values)
        return await cursor.fetchall() if cursor.description else cursor.rowcount


async def swept(pool, **given):
    """One pass; returns the pools with ready runs."""
    async with pool.connection() as connection:
        return await sweep(
            connection,
            given.get("poison", 5),
            LEASE_S,
            LONG_S,
            given.get("retention_s", LONG_S),
            ended=given.get("ended"),
        )


async def claimed(pool, count, lease_s=60.0):
    async with pool.connection() as connection:
        return await claim(connection, "default", "x", lease_s, count, longest_waiting=False)


async def states(pool):
    return sorted(await sql(pool, "select status, error->>'error' from runs"))


async def broken(pool):
    async with pool.connection() as connection:
        return (await check_runs(connection)).violations


async def test_a_thousand_runs_that_are_due_at_once_become_ready_in_one_pass(pool):
    """In the order of their threads. Red when a pass releases one batch, or a thread gets more than one run."""
    threads = [new_id() for _ in range(100)]
    async with pool.connection() as connection, connection.transaction():
        for n in range(1000):
            await submit_on_thread(connection, threads[n % 100])
    assert await swept(pool) == {"default": 100}
    rows = await sql(pool, "select gate, count(*) from runs group by gate order by gate")
    assert rows == [("thread", 900), (None, 100)]
    assert await broken(pool) == []


async def test_a_run_that_was_given_back_when_it_was_cancelled_ends_without_an_executor(pool):
    """Red when only an executor ends it, with its next claim, and all of them have gone."""
    await submit(pool, submission("a", new_id()))
    (run,) = await claimed(pool, 1)
    await request_cancel(pool, run.fence.key, "interrupt")
    async with pool.connection() as connection:
        assert await hand_over(connection, [run.fence]) == ([run.fence], set())
    ended = []
    await swept(pool, ended=ended)
    assert await states(pool) == [("interrupted", None)]
    assert [each.run_id for each in ended] == [run.fence.key.run_id]
    assert await broken(pool) == []


async def test_runs_that_cannot_be_ended_for_now_keep_no_other_from_its_end(pool, monkeypatch):
    """As many as are looked at in one go. Red when they are always the same: the others would wait for as long."""
    monkeypatch.setattr("sandfleet.shared.store.sweep.BATCH", 1)
    monkeypatch.setattr("sandfleet.shared.store.sweep._ROUNDS", 1)
    for tenant in ("a", "b"):
        await submit(pool, submission(tenant, new_id()))
    await claimed(pool, 2, lease_s=-1)
    async with pool.connection() as holder, pool.connection() as connection, holder.transaction():
        await holder.execute("select 1 from tenants where tenant = 'a' for update")
        await connection.execute("set lock_timeout = '100ms'")

        async def over():
            await sweep(connection, 1, LEASE_S, LONG_S, LONG_S)
            return ("error", "ExecutorLost") in await states(pool)

        await eventually(over, what="the end of the other tenant's run")


async def submit_on_thread(connection, thread):
    await submit_on(connection, submission("a", thread, delay_s=0.000001))


async def test_a_run_over_its_time_limit_is_ended_when_no_executor_does(pool):
    """The time counts from the first start. Red when the sweep forgets runs that wait for their next executor, ends one
    that was never started, or one that its executor may still be ending."""
    for _ in range(4):
        await submit(pool, submission("a", new_id(), timeout_s=100))
    given_back, late, ending_now = await claimed(pool, 3)
    await sql(pool, "update runs set created_at = created_at - interval '1 day'")
    for run, age_s in ((given_back, 101), (late, 111), (ending_now, 101)):
        await sql(
            pool,
            "update runs set started_at = clock_timestamp() - make_interval(secs => %s) where run_id = %s",
            age_s,
            run.fence.key.run_id,
        )
    await sql(
        pool,
        "update runs set lease_expires_at = clock_timestamp() - interval '1 s' where run_id = %s",
        given_back.fence.key.run_id,
    )
    await swept(pool)
    await swept(pool)
    assert await states(pool) == [
        ("pending", None),
        ("running", None),
        ("timeout", "RunTimeout"),
        ("timeout", "RunTimeout"),
    ]
    assert await broken(pool) == []


async def test_a_run_whose_executor_comes_back_in_time_is_not_ended(pool, monkeypatch):
    """Red when what the sweep has found is not looked at again under the locks."""
    await submit(pool, submission("a", new_id()))
    (run,) = await claimed(pool, 1, lease_s=-1)
    async with pool.connection() as connection:
        execute, looked = connection.execute, False

        async def renewed_between(query, *args, **kwargs):
            nonlocal looked
            if str(query).startswith("select 1 from tenants") and not looked:  # at the first lock
                looked = True
                async with pool.connection() as other:
                    assert run.fence in (await renew(other, [run.fence], 60)).held
            return await execute(query, *args, **kwargs)

        monkeypatch.setattr(connection, "execute", renewed_between)
        await sweep(connection, 1, LEASE_S, LONG_S)
        assert looked
    assert await states(pool) == [("running", None)]


async def test_a_lost_run_that_was_to_be_rolled_back_leaves_its_thread_as_it_was(pool):
    """Red when the thread is left interrupted by a run that is gone."""
    accepted = await submit(pool, submission("a", new_id()))
    await claimed(pool, 1, lease_s=-1)
    await request_cancel(pool, RunKey("a", "u", accepted.run_id), "rollback")
    await swept(pool)
    assert await states(pool) == []
    assert await sql(pool, "select status, active_run from threads") == [("idle", None)]


async def test_the_sweep_names_the_runs_that_it_has_ended(pool):
    """With the attempt and the error of their last events, for those who watch them. Red when one is forgotten, or when
    one is named that was rolled back: it is gone."""
    for action in (None, "interrupt", "rollback"):
        accepted = await submit(pool, submission("a", new_id()))
        await claimed(pool, 1, lease_s=-1)
        if action is not None:
            await request_cancel(pool, RunKey("a", "u", accepted.run_id), action)
    ended = []
    await swept(pool, poison=1, ended=ended)
    journal = await sql(
        pool, "select run_id, attempt, array_agg(event order by seq) from journal group by 1, 2"
    )
    names = {(run.run_id, run.attempt): ["error", "end"] if run.error else ["end"] for run in ended}
    assert names == {(run_id, attempt): events for run_id, attempt, events in journal}
    assert len(names) == 2


async def test_a_raised_cap_lets_waiting_runs_through(pool):
    """Red when slots are only passed on at a run's end."""
    await sql(pool, "update tenants set max_in_flight = 1")
    for _ in range(4):
        await submit(pool, submission("a", new_id()))
    await sql(pool, "update tenants set max_in_flight = 3")
    assert await swept(pool) == {"default": 2}
    assert await broken(pool) == []


async def test_what_one_tenant_blocks_holds_up_no_other(pool, database):
    """Red when a step that cannot get a lock ends the pass, or waits for it without a limit."""
    for tenant in ("a", "b"):
        await submit(pool, submission(tenant, new_id(), delay_s=0.000001))
    await submit(pool, submission("b", new_id()))
    await claimed(pool, 1, lease_s=-1)
    async with await psycopg.AsyncConnection.connect(database) as blocker:
        await blocker.execute("select 1 from tenants where tenant = 'a' for update")
        async with (
            asyncio.timeout(60),
            await psycopg.AsyncConnection.connect(database, autocommit=True) as own,
        ):
            await set_limits(own)
            assert await sweep(own, 5, LEASE_S, LONG_S, LONG_S) == {"default": 2}
        await blocker.rollback()
    assert await swept(pool) == {"default": 1}


async def test_sweeps_in_many_copies_do_everything_once(pool):
    """Red when an expired lease is returned twice: it would count as two deaths."""
    for n in range(150):
        await submit(pool, submission("ab"[n % 2], new_id()))
    assert len(await claimed(pool, 150, lease_s=-1)) == 150
    for n in range(150):
        await submit(pool, submission("ab"[n % 2], new_id(), delay_s=0.000001))
    passes = await asyncio.gather(*(swept(pool) for _ in range(8)))
    assert sum(found.get("default", 0) for found in passes) == 300
    assert await sql(pool, "select deaths, count(*) from runs group by deaths order by deaths") == [
        (0, 150),
        (1, 150),
    ]
    assert await broken(pool) == []


async def test_the_thread_of_a_stateless_run_is_removed_in_time(pool):
    """Red when it is kept, or when a run that was accepted on it meanwhile goes with it."""
    old, used = new_id(), new_id()
    for thread in (old, used):
        await submit(pool, submission("a", thread, temporary=True))
        (run,) = await claimed(pool, 1)
        async with pool.connection() as connection:
            await finish(connection, run.fence, ending("success"))
    await sql(pool, "update threads set expires_at = clock_timestamp() - interval '1 s'")
    await submit(pool, submission("a", used))
    await swept(pool)
    assert await sql(pool, "select thread_id from threads") == [(used,)]
    assert await sql(pool, "select count(*) from runs where thread_id = %s", used) == [(2,)]


async def test_a_thread_that_is_due_at_this_moment_is_left_alone(pool, monkeypatch):
    """Red when the thread is removed by what was read before its lock: the run that was accepted on it would be lost."""
    thread = new_id()
    await submit(pool, submission("a", thread, temporary=True))
    (run,) = await claimed(pool, 1)
    async with pool.connection() as connection:
        await finish(connection, run.fence, ending("success"))
    await sql(pool, "update threads set expires_at = clock_timestamp() - interval '1 s'")
    async with pool.connection() as connection:
        execute, accepted = connection.execute, []

        async def taken_after(query, *args, **kwargs):
            found = await execute(query, *args, **kwargs)
            if "from threads" in str(query) and "expires_at <" in str(query) and not accepted:
                accepted.append(await submit(pool, submission("a", thread)))
            return found

        monkeypatch.setattr(connection, "execute", taken_after)
        await sweep(connection, 5, LEASE_S, LONG_S)
        assert accepted
    assert await sql(pool, "select thread_id, status from threads") == [(thread, "busy")]
    assert ("pending", None) in await states(pool)


async def test_old_journals_go_but_for_their_end(pool):
    """Red when young journals go, old ones stay, or a stream of an old run would find no end."""
    for _ in range(2):
        await submit(pool, submission("a", new_id()))
    old, young = await claimed(pool, 2)
    async with pool.connection() as connection:
        for run in (old, young):
            await connection.execute(
                "insert into journal values ('a', 'u', %s, 1, 0, 'metadata', '{}')", (run.fence.key.run_id,)
            )
            await finish(connection, run.fence, ending("success"))
    await sql(
        pool,
        "update runs set finished_at = finished_at - interval '1 hour' where run_id = %s",
        old.fence.key.run_id,
    )
    await swept(pool, retention_s=1800)
    rows = await sql(pool, "select run_id, event from journal order by event")
    assert sorted(rows) == sorted(
        [
            (old.fence.key.run_id, "end"),
            (young.fence.key.run_id, "end"),
            (young.fence.key.run_id, "metadata"),
        ]
    )
    assert await broken(pool) == []
    assert await sql(pool, "select count(*) from runs where journal_expired") == [(1,)]


async def test_what_dead_processes_left_is_forgotten(pool):
    """Executors, hosts, operations that nobody waits for, idempotency keys. Red when any of them stays."""
    await submit(pool, submission("a", new_id(), kind="update_state", idempotency_key="k", request_hash=b"1"))
    (run,) = await claimed(pool, 1)
    async with pool.connection() as connection:
        await finish(connection, run.fence, ending("success"))
    for executor, age in (("dead", 301), ("silent", 60)):
        await sql(
            pool,
            "insert into executors (executor_id, pool, slots, busy, heartbeat_at)"
            " values (%s, 'default', 1, 0, clock_timestamp() - make_interval(secs => %s))",
            executor,
            age,
        )
    await swept(pool)
    assert await sql(pool, "select executor_id from executors") == [("silent",)]
    assert len(await states(pool)) == 1
    await sql(pool, "update runs set finished_at = finished_at - interval '301 s'")
    await sql(pool, "update idempotency_keys set created_at = created_at - interval '20 days'")
    await swept(pool)
    assert await states(pool) == []
    assert await sql(pool, "select event from journal") == []
    assert await sql(pool, "select key from idempotency_keys") == []


async def test_one_of_many_gets_the_turn(pool):
    """Red when two get it, or when it never comes again."""

    async def ask():
        async with pool.connection() as connection:
            return await take_turn(connection, "sweep", 60)

    assert sum(await asyncio.gather(*(ask() for _ in range(12)))) == 1
    assert not await ask()
    await sql(pool, "update turns set due_at = due_at - interval '60 s'")
    assert await ask()


async def test_the_turn_to_sweep_comes_as_soon_as_a_lease_ends(pool):
    """Red when a run whose executor is gone waits for the end of the pause, or an expired lease makes turns come at once
    for ever."""
    for _ in range(2):
        await submit(pool, submission("a", new_id()))

    async def next_turn_s():
        await sql(pool, "update turns set due_at = '-infinity'")
        async with pool.connection() as connection:
            return await take_sweep_turn(connection, 60)

    assert 59 < await next_turn_s() <= 60
    await claimed(pool, 1, lease_s=-1)
    assert 59 < await next_turn_s() <= 60
    await claimed(pool, 1, lease_s=30)
    assert 0 < await next_turn_s() < 31
    assert await sql(
        pool,
        "select count(*) from turns, runs where name = 'sweep' and due_at > lease_expires_at"
        " and lease_expires_at > clock_timestamp()",
    ) == [(1,)]


@pytest.fixture
async def permits(servers, queue_urls):
    permits = Permits(Settings(aws_endpoint_url=servers.aws_endpoint_url, queue_urls=queue_urls))
    yield permits
    await permits.aclose()


async def missing(pool, permits):
    await sql(pool, "update turns set due_at = '-infinity'")
    async with pool.connection() as connection:
        wanted = await top_up.wanted_permits(connection)
    return await top_up.missing_permits(permits, wanted)


@pytest.mark.emulators
async def test_a_queue_is_topped_up_to_what_executors_have_room_for(pool, permits):
    """Red when lost permits are not sent again, more are sent than there are free slots or ready runs, or any for a run
    that has only just become ready, or for an executor that is gone."""
    for _ in range(5):
        await submit(pool, submission("a", new_id()))
    await sql(
        pool,
        "insert into executors (executor_id, pool, slots, busy, heartbeat_at) values"
        " ('e', 'default', 4, 1, clock_timestamp()), ('gone', 'default', 64, 0, clock_timestamp() - interval '11 s')",
    )
    assert await missing(pool, permits) == {}
    await sql(pool, "update runs set ready_at = clock_timestamp() - interval '1 day'")
    assert await missing(pool, permits) == {"default": 3}
    await permits.send("default", 2)
    assert await missing(pool, permits) == {"default": 1}
    await permits.send("default", 1)
    assert await missing(pool, permits) == {}
    await sql(pool, "update executors set slots = 100")
    assert await missing(pool, permits) == {"default": 2}
    async with pool.connection() as connection:
        assert await top_up.wanted_permits(connection) == {}, "somebody else's turn"


async def test_a_sweep_stays_quick_beside_many_runs(pool):
    """Bounded by what there is to do, not by what there is. Red when a step reads all runs: see its plan."""
    await sql(
        pool,
        """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
             multitask_strategy, timeout_s, kwargs, metadata, finished_at, started_at)
           select 'a', 'u', gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'g', 'run', 'default', 1, 'success',
             'enqueue', 60, '{}', '{}', clock_timestamp(), clock_timestamp() from generate_series(1, 50000)""",
    )
    for state in (
        "status = 'running', lease_owner = 'gone', lease_expires_at = clock_timestamp() - interval '1 s'",
        "status = 'pending', finished_at = null, gate = 'time', not_before = clock_timestamp()",
        "status = 'running', finished_at = null, started_at = clock_timestamp() - interval '1 day'",
        "status = 'success', finished_at = clock_timestamp() - interval '20 days'",
        "kind = 'update_state', finished_at = clock_timestamp() - interval '1 day'",
    ):
        await sql(
            pool, f"update runs set {state} where seq = (select max(seq) from runs where status = 'success')"
        )
    await sql(pool, "analyze runs")
    async with pool.connection() as connection:
        plans = []
        execute = connection.execute

        async def explained(query, *args, **kwargs):
            if "from runs" in str(query) and ("limit" in str(query) or "beat" in str(query)):
                cursor = await execute(f"explain {query}", *args, **kwargs)
                plans.append("\n".join(row[0] for row in await cursor.fetchall()))
            return await execute(query, *args, **kwargs)

        connection.execute = explained
        begun = time.monotonic()
        await sweep(connection, 5, LEASE_S, LONG_S)
        del connection.execute
    print(f"a sweep beside 50,000 ended runs: {1000 * (time.monotonic() - begun):.0f} ms")
    assert "Insert on pulse" in plans[0]
    assert len(plans) >= 6
    assert [plan for plan in plans if "Seq Scan on runs" in plan] == []
