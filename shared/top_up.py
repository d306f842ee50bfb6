"""Topping queues up: permits that were lost are sent again, as many as executors have room for and never by age."""

import asyncio
from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.permits import Permits
from sandfleet.shared.store.ready import ReadyRuns
from sandfleet.shared.store.turns import take_turn

TURN = "top_up"
"""Name of the turn that says who tops up."""

TOP_UP_EVERY_S = 10.0
"""SQS counts late: asked more often, it would not know yet what was sent the last time."""

_ON_ITS_WAY_S = 2.0  # a run that has just become ready has its permit on the way
_SQS_LIMIT_S = 2.0
_SILENT_AFTER_S = 10.0  # an executor beats every 3 s


async def wanted_permits(connection: AsyncConnection[Any]) -> ReadyRuns:
    """How many permits each queue should hold, min(ready runs, free slots), if it is our turn to look; else nothing.

    Executors only count while they beat. ``connection`` is in autocommit mode.
    """
    if not await take_turn(connection, TURN, TOP_UP_EVERY_S):
        return {}
    cursor = await connection.execute(
        """select pool, (select count(*) from (
                   select 1 from runs r where r.status = 'pending' and r.gate is null and r.pool = e.pool
                     and r.ready_at < clock_timestamp() - make_interval(secs => %s) limit e.free) ready)
           from (select pool, sum(greatest(slots - busy, 0)) as free from executors
                 where heartbeat_at > clock_timestamp() - make_interval(secs => %s) group by pool) e""",
        (_ON_ITS_WAY_S, _SILENT_AFTER_S),
    )
    return {pool: count for pool, count in await cursor.fetchall() if count}


async def missing_permits(permits: Permits, wanted: ReadyRuns) -> ReadyRuns:
    """What the queues hold less than they should. A queue that does not answer counts as empty: a ring may still wake."""
    missing: ReadyRuns = {}
    for pool, count in wanted.items():
        visible = 0
        if permits.has_queue(pool):
            try:
                async with asyncio.timeout(_SQS_LIMIT_S):
                    visible = await permits.visible(pool)
            except Exception:  # whatever the client raises; the queue is only a hint
                visible = 0
        if visible < count:
            missing[pool] = count - visible
    return missing
