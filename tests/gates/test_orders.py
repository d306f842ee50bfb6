"""What an executor is told once a second: which of its runs are to end, and whether it is its turn to sweep."""

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence, Owner, RunKey, new_id
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.orders import Orders, orders
from sandfleet.shared.store.submission import submit
from tests.gates.test_gates import submission

EVERY_S = 60.0


@pytest.fixture
async def connection(database):
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as opened:
        await opened.execute("truncate runs, threads, tenants, api_keys cascade")
        await opened.execute("update turns set due_at = default")
        await create_key(opened, Owner("a", "u"), "test")
        yield opened


async def test_cancels_are_told_to_the_attempt_that_holds_the_run(connection, database):
    """Red when PostgreSQL is not asked for cancels, whose keys Redis may have lost, or when a superseded attempt is told of
    its successor's."""
    async with open_pool(database, 2) as pool:
        for _ in range(2):
            await submit(pool, submission("a", new_id()))
        held, other = await claim(connection, "default", "x", 60, 2, longest_waiting=False)
        await request_cancel(pool, RunKey(*held.fence.key), "rollback")
    found = await orders(connection, [held.fence, other.fence], sweep_every_s=EVERY_S, may_sweep=False)
    assert found == Orders({held.fence: "rollback"}, None)
    old = Fence(held.fence.key, held.fence.attempt - 1)
    assert (await orders(connection, [old], sweep_every_s=EVERY_S, may_sweep=False)).cancels == {}
    assert (await orders(connection, [], sweep_every_s=EVERY_S, may_sweep=False)).cancels == {}


async def test_the_turn_to_sweep_comes_with_them(connection):
    """Once for all who ask. Red when an executor that still sweeps takes the turn: nobody would do the work."""
    assert await orders(connection, [], sweep_every_s=EVERY_S, may_sweep=False) == Orders({}, None)
    first = await orders(connection, [], sweep_every_s=EVERY_S, may_sweep=True)
    assert first.next_sweep_s is not None
    assert 0 < first.next_sweep_s <= EVERY_S
    assert await orders(connection, [], sweep_every_s=EVERY_S, may_sweep=True) == Orders({}, None)
