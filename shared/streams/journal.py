"""What PostgreSQL knows of a run's events: the journal, and whether the run has ended."""

from collections.abc import Sequence
from typing import NamedTuple

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams.entry import START, Event, EventId


class Head(NamedTuple):
    """The last journalled event of a run, and whether the run has ended; then that event is its ``end``."""

    id: EventId
    ended: bool


_HEAD = """
  select attempt, seq from journal j
  where j.tenant = k.tenant and j.user_id = k.user_id and j.run_id = k.run_id order by attempt desc, seq desc limit 1"""

_LOOK = f"""
  select k.status not in ('pending', 'running'), h.attempt, h.seq
  from runs k left join lateral ({_HEAD}) h on true
  where k.tenant = %s and k.user_id = %s and k.run_id = %s"""


async def look(pool: Pool, key: RunKey) -> Head | None:
    """The head of one run, or None when there is no such run."""
    async with pool.connection() as connection:
        row = await (await connection.execute(_LOOK, tuple(key))).fetchone()
    return None if row is None else _head(*row)


_NEWS = f"""
  select k.n, r.status not in ('pending', 'running'), h.attempt, h.seq
  from unnest(%s::text[], %s::text[], %s::uuid[], %s::int[], %s::int[])
    with ordinality k (tenant, user_id, run_id, attempt, seq, n)
  left join runs r using (tenant, user_id, run_id)
  left join lateral ({_HEAD}) h on true
  where r.status is null or r.status not in ('pending', 'running') or (h.attempt, h.seq) > (k.attempt, k.seq)"""


async def news(pool: Pool, seen: Sequence[tuple[RunKey, EventId]]) -> list[tuple[RunKey, Head | None]]:
    """Of the given runs those that have ended, have vanished (None), or have events beyond the one that was seen."""
    keys = [key for key, _ in seen]
    async with pool.connection() as connection:
        cursor = await connection.execute(
            _NEWS,
            (
                [key.tenant for key in keys],
                [key.user_id for key in keys],
                [key.run_id for key in keys],
                [last.attempt for _, last in seen],
                [last.seq for _, last in seen],
            ),
        )
        rows = await cursor.fetchall()
    return [
        (keys[n - 1], None if ended is None else _head(ended, attempt, seq))
        for n, ended, attempt, seq in rows
    ]


_EVENTS = """
  select attempt, seq, event, data from journal
  where tenant = %s and user_id = %s and run_id = %s
    and (attempt, seq) > (%s::int, %s::int) and (attempt, seq) < (%s::int, %s::int)
  order by attempt, seq limit %s"""


async def events_between(pool: Pool, key: RunKey, after: EventId, before: EventId, limit: int) -> list[Event]:
    """The first ``limit`` journalled events between two ids, both exclusive."""
    async with pool.connection() as connection:
        cursor = await connection.execute(_EVENTS, (*key, *after, *before, limit))
        rows = await cursor.fetchall()
    return [Event(EventId(attempt, seq), event, data) for attempt, seq, event, data in rows]


def _head(ended: bool, attempt: int | None, seq: int | None) -> Head:
    return Head(START if attempt is None or seq is None else EventId(attempt, seq), ended)
