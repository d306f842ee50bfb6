"""A writer, a pool and running runs on a database of the module's own."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.ids import Fence, Owner, RunKey, new_id

OWNER = Owner("acme", "ann")

StartRun = Callable[..., Awaitable[Fence]]
MakeSaver = Callable[..., FencedSaver]


@pytest.fixture
async def connection(database: str) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection to look into the database with, and to do what other processes would do."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, 4) as pool:
        yield pool


@pytest.fixture
async def writer(database: str) -> AsyncIterator[FencedWriter]:
    writer = FencedWriter(database)
    await writer.start()
    yield writer
    await writer.stop()


@pytest.fixture
def start_run(connection: AsyncConnection[Any]) -> StartRun:
    """Makes a run that is running under attempt 1, and returns its fence."""

    async def start(owner: Owner = OWNER) -> Fence:
        run_id = new_id()
        await connection.execute(
            """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
                                 attempt, multitask_strategy, timeout_s, kwargs, metadata)
               values (%s, %s, %s, %s, %s, 'g', 'run', 'default', 1, 'running', 1, 'enqueue', 60, '{}', '{}')""",
            (*owner, run_id, uuid.uuid4(), uuid.uuid4()),
        )
        return Fence(RunKey(*owner, run_id), 1)

    return start


@pytest.fixture
def make_saver(writer: FencedWriter, pool: Pool) -> MakeSaver:
    """Makes savers: without a fence unless one is given."""

    def make(fence: Fence | None = None, owner: Owner = OWNER, **options: Any) -> FencedSaver:
        return FencedSaver(writer, pool, fence.key.owner if fence else owner, fence, **options)

    return make


async def take_over(connection: AsyncConnection[Any], fence: Fence) -> None:
    """What a successor's claim does: the next attempt."""
    await connection.execute(
        "update runs set attempt = attempt + 1 where run_id = %s and attempt = %s",
        (fence.key.run_id, fence.attempt),
    )


async def count(connection: AsyncConnection[Any], table: str, **where: Any) -> int:
    """How many rows of a table have these values."""
    condition = " and ".join(f"{column} = %({column})s" for column in where) or "true"
    cursor = await connection.execute(f"select count(*) from {table} where {condition}".encode(), where)
    row = await cursor.fetchone()
    assert row is not None
    number: int = row[0]
    return number
