"""Ready runs: which pools got some when a thread or slot was passed on, and how many nobody has taken."""

from collections.abc import Iterable
from typing import Any

from psycopg import AsyncConnection

ReadyRuns = dict[str, int]
"""Runs that became ready, by pool: as many executors should be woken."""


def ready_by_pool(rows: Iterable[tuple[str | None, int]]) -> ReadyRuns:
    """Gather the (pool, count) rows of a gate function; rows without a pool carry nothing."""
    ready: ReadyRuns = {}
    for pool, count in rows:
        if pool is not None:
            ready[pool] = ready.get(pool, 0) + count
    return ready


async def count_ready(connection: AsyncConnection[Any], pool: str, limit: int) -> int:
    """How many runs of a pool wait for an executor, counted up to ``limit``."""
    cursor = await connection.execute(
        "select count(*) from (select 1 from runs where status = 'pending' and gate is null and pool = %s limit %s) r",
        (pool, limit),
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
