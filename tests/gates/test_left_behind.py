"""Sandboxes that were left behind: what their silent host says of them later counts for nothing, and what a caller is told."""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence, RunKey, new_id
from sandfleet.shared.store import sandboxes, snapshots
from sandfleet.shared.store.snapshots import Held
from tests.sandbox.host_process import INSERT_RUN

Connection = psycopg.AsyncConnection[Any]


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as opened:
        yield opened


async def placed(connection: Connection, host_id: str) -> RunKey:
    """A run, as far as its sandbox is concerned, that is on a host."""
    key = RunKey("a", "u", new_id())
    await connection.execute(
        "insert into placements (tenant, user_id, run_id, host_id, template, memory, pids) values (%s, %s, %s, %s, 'default', 1, 1)",
        (*key, host_id),
    )
    return key


async def alone(connection: Connection, host_id: str) -> RunKey:
    """A sandbox without a run, in its second generation, on a host."""
    key = await placed(connection, host_id)
    await connection.execute(
        """insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, generation, expires_at)
           values (%s, %s, %s, 'default', '{}', 2, clock_timestamp() + interval '1 h')""",
        key,
    )
    return key


async def kept(connection: Connection, key: RunKey, held: Held, reason: str = "drain") -> bool:
    """Record a snapshot; whether it counts."""
    values = {
        "snapshot_id": new_id(),
        "reason": reason,
        "object_key": "o",
        "bytes": 1,
        "files": 1,
        "content_bytes": 1,
        "skipped": 0,
    }
    recorded = await snapshots.record(connection, key, values, 60.0, held)
    found = await snapshots.to_restore(connection, key)
    assert recorded is None or found == recorded
    return recorded is not None


async def test_a_host_that_a_run_has_left_keeps_nothing_of_it(connection: Connection) -> None:
    """Red when a host that was silent replaces what a later one has kept, also where the run is over or waits for somebody."""
    key = await placed(connection, "later")
    assert await kept(connection, key, Held("later", 2))
    newest = await snapshots.to_restore(connection, key)
    assert not await kept(connection, key, Held("silent", 1))
    await connection.execute("delete from placements where run_id = %s", (key.run_id,))
    assert not await kept(connection, key, Held("silent", 1))
    assert await snapshots.to_restore(connection, key) == newest


async def test_an_earlier_generation_of_a_sandbox_keeps_nothing(connection: Connection) -> None:
    """Its host has the later one, too, or is to make it. Red when only the host is looked at."""
    key = await alone(connection, "h")
    assert not await kept(connection, key, Held("h", 1))
    assert not await kept(connection, key, Held("other", 2))
    assert await kept(connection, key, Held("h", 2))


@pytest.mark.parametrize("reason", ["interrupt", "request"])
async def test_a_superseded_attempt_keeps_nothing(connection: Connection, reason: str) -> None:
    """Though it began to before its successor spoke. Red when only hosts are looked at: its older files replace newer ones. A
    host that stops keeps what is there, whoever has the run."""
    key = await placed(connection, "h")
    await connection.execute(INSERT_RUN, (*key, new_id(), new_id()))
    await connection.execute("update runs set attempt = 2 where run_id = %s", (key.run_id,))
    assert await kept(connection, key, Held("h", 2), reason)
    assert not await kept(connection, key, Held("h", 1), reason)
    assert await kept(connection, key, Held("h", 1))


@pytest.mark.parametrize("there", [True, False], ids=["there", "expired"])
async def test_a_snapshot_that_expired_before_it_was_restored_is_told(
    connection: Connection, database: str, there: bool
) -> None:
    """Red when a sandbox that was begun anew from it is empty, and nobody says so."""
    key = await alone(connection, "h")
    assert await kept(connection, key, Held("h", 2), "request")
    taken = await snapshots.to_restore(connection, key)
    assert taken is not None
    async with open_pool(database, 1) as pool:
        assert await sandboxes.restore(pool, Fence(key, 2), taken.snapshot_id)
        assert await sandboxes.made(pool, Fence(key, 3), "s", taken.snapshot_id if there else None)
        row = await sandboxes.get(pool, key)
    assert row is not None
    assert row.told is there
    assert ("is gone" in str(row.lost)) is not there
