"""When leases expire: not while nobody could renew them; and when sandboxes without a run do."""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.submission import submit
from sandfleet.shared.store.sweep import sweep
from tests.gates.test_gates import submission
from tests.waiting import eventually

LEASE_S = 8.0
Connection = psycopg.AsyncConnection[Any]


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    """A database that has answered for long, with one running run whose executor is gone."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as opened:
        await opened.execute("truncate runs, threads, tenants, api_keys, pulse cascade")
        await create_key(opened, Owner("a", "u"), "test")
        async with open_pool(database, 1) as pool:
            await submit(pool, submission("a", new_id()))
        assert await claim(opened, "default", "x", 0.0, 1, longest_waiting=False)
        up = "select clock_timestamp() > pg_postmaster_start_time() + make_interval(secs => %s)"

        async def long_up() -> bool:
            row = await (await opened.execute(up, (LEASE_S,))).fetchone()
            return row is not None and row[0]

        await eventually(long_up, 30, "a server that has been up for a lease")
        await set_pulse(opened, beat="0 s", steady="1 hour")
        yield opened


async def set_pulse(connection: Connection, *, beat: str, steady: str) -> None:
    """As if the last sweep had been ``beat`` ago, and sweeps had come without a pause since ``steady`` ago."""
    await connection.execute("delete from pulse")
    await connection.execute(
        "insert into pulse (beat_at, steady_since)"
        " values (clock_timestamp() - %s::interval, clock_timestamp() - %s::interval)",
        (beat, steady),
    )


async def state(connection: Connection) -> tuple[Any, ...]:
    return (await (await connection.execute("select status, attempt, deaths from runs")).fetchall())[0]


async def test_an_expired_lease_is_returned(connection: Connection) -> None:
    """And counted as a death."""
    assert await sweep(connection, 5, LEASE_S, 3600) == {"default": 1}
    assert await state(connection) == ("pending", 1, 1)


async def test_after_a_pause_leases_hold_for_one_lease_more(connection: Connection) -> None:
    """The database was frozen: no start, no error, but nobody swept. Red without the pulse: a death is counted."""
    await set_pulse(connection, beat="6 s", steady="1 hour")
    assert await sweep(connection, 5, LEASE_S, 3600) == {}
    assert await state(connection) == ("running", 1, 0)
    await set_pulse(connection, beat="1 s", steady="5 s")
    assert await sweep(connection, 5, LEASE_S, 3600) == {}
    await set_pulse(connection, beat="1 s", steady="9 s")
    assert await sweep(connection, 5, LEASE_S, 3600) == {"default": 1}


async def test_the_first_sweep_of_all_waits_for_a_lease(connection: Connection) -> None:
    """Nobody knows what was before. Red when an empty table counts as long quiet."""
    await connection.execute("delete from pulse")
    assert await sweep(connection, 5, LEASE_S, 3600) == {}
    assert await state(connection) == ("running", 1, 0)


async def test_a_lease_that_held_when_the_sweep_began_does_not_expire_in_it(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is frozen within a sweep. Red when a later step of it reads the clock anew."""
    await connection.execute(
        """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
             multitask_strategy, timeout_s, kwargs, metadata, lease_owner, lease_expires_at)
           select tenant, user_id, gen_random_uuid(), gen_random_uuid(), assistant_id, graph_id, kind, pool, class, status,
             multitask_strategy, timeout_s, kwargs, metadata, 'x', clock_timestamp() + interval '2 s' from runs"""
    )
    execute = connection.execute

    async def frozen(query: Any, *args: Any, **kwargs: Any) -> Any:
        if "expired as materialized" in str(query):
            await execute("select pg_sleep(2.2)")
        return await execute(query, *args, **kwargs)

    monkeypatch.setattr(connection, "execute", frozen)
    assert await sweep(connection, 5, LEASE_S, 3600) == {"default": 1}
    rows = await (await connection.execute("select status, deaths from runs order by status")).fetchall()
    assert rows == [("pending", 1), ("running", 0)]


async def test_a_sandbox_without_a_run_ends_with_its_time(connection: Connection) -> None:
    """With its place, and the snapshot that nobody asked for; what was asked for is kept. Breaks when the sweep leaves any of
    them, or takes one that has time left."""
    for name in ("over", "live"):
        await connection.execute(
            """with made as (
                 insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, expires_at)
                 values ('a', 'u', gen_random_uuid(), %(name)s, '{}',
                         clock_timestamp() + case %(name)s when 'over' then '-1 s' else '1 h' end::interval)
                 returning *),
               placed as (
                 insert into placements (tenant, user_id, run_id, host_id, template, memory, pids)
                 select tenant, user_id, sandbox_id, 'h', template, 1, 1 from made)
               insert into snapshots (tenant, user_id, snapshot_id, run_id, reason, object_key, bytes, files, content_bytes,
                                      skipped, expires_at)
               select tenant, user_id, gen_random_uuid(), sandbox_id, reason, template, 1, 1, 1, 0,
                      clock_timestamp() + interval '1 h' from made, unnest(array['drain', 'request']) reason""",
            {"name": name},
        )
    await sweep(connection, 5, LEASE_S, 3600)
    for table in ("sandboxes", "placements"):
        cursor = await connection.execute(f"select template from {table}")
        assert await cursor.fetchall() == [("live",)]
    cursor = await connection.execute(
        "select object_key, reason from snapshots where expires_at > clock_timestamp() order by 1, 2"
    )
    assert await cursor.fetchall() == [("live", "drain"), ("live", "request"), ("over", "request")]
