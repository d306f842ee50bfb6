"""How loaded a pool is, and what the last decision about it has left: PostgreSQL's, on its clock."""

from collections.abc import Set
from typing import Any, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from sandfleet.shared.scaling.decision import Load, Memory

_MOST_READY = 100_000
"""Ready runs that are counted at most: no fleet is large enough for more, and a count is a scan."""

_RECENT = 200
"""Ended runs that the mean duration is taken over."""

_RECENT_S = 900.0
_SILENT_AFTER_S = 10.0  # an executor beats every 3 s

_PARAMETERS = {
    "most": _MOST_READY,
    "silent_s": _SILENT_AFTER_S,
    "recent": _RECENT,
    "recent_s": _RECENT_S,
}

_QUEUE: LiteralString = """
  select extract(epoch from clock_timestamp())::float8 as at_s, r.ready,
    coalesce(extract(epoch from clock_timestamp() - r.oldest), 0)::float8 as oldest_s,
    e.executors, e.idle, e.slots, e.busy, e.free, d.run_s
  from (select count(*) as ready, min(ready_at) as oldest from (
          select ready_at from runs where status = 'pending' and gate is null and pool = %(pool)s limit %(most)s) r) r,
    (select avg(extract(epoch from finished_at - started_at))::float8 as run_s from (
       select pool, started_at, finished_at from runs
       where finished_at > clock_timestamp() - make_interval(secs => %(recent_s)s) and not journal_expired
         and kind = 'run' and started_at is not null
       order by finished_at desc limit %(recent)s) f
     where f.pool = %(pool)s) d,
    executors_now e"""

_BEATING: LiteralString = """executors
  where pool = %(pool)s and heartbeat_at > clock_timestamp() - make_interval(secs => %(silent_s)s)"""

# One that drains takes nothing and is on its way out: counted, it would be kept instead of the one that replaces it.
_ALIVE: LiteralString = f"{_BEATING} and retiring_until is distinct from 'infinity'"

# One that retires takes nothing, so its room is nobody's: counted, a pool that shrinks would look as if it had too much still.
_FREE: LiteralString = (
    "case when retiring_until > clock_timestamp() then 0 else greatest(slots - busy, 0) end"
)

_EXECUTORS: LiteralString = f"""
  with executors_now as (
    select count(*) as executors, count(*) filter (where busy = 0) as idle,
      coalesce(sum(slots), 0)::int as slots, coalesce(sum(busy), 0)::int as busy, coalesce(sum({_FREE}), 0)::int as free
    from {_ALIVE})
  {_QUEUE}"""

# A host has what its executors have, and takes part with a sandbox alone, too. It is not idle while one drains on it.
_HOSTS: LiteralString = f"""
  with alive as (
    select host_id, 0 as slots, 0 as busy, 0 as free, sandboxes from open_hosts()
    union all select coalesce(host_id, executor_id), slots, busy, {_FREE}, 0 from {_ALIVE}
    union all select host_id, 0, busy, 0, 0 from {_BEATING} and retiring_until = 'infinity'
      and host_id in (select host_id from open_hosts())),
  hosts_now as (
    select sum(slots) as slots, sum(busy) as busy, sum(free) as free, sum(sandboxes) as sandboxes from alive group by host_id),
  executors_now as (
    select count(*) as executors, count(*) filter (where busy = 0 and sandboxes = 0) as idle,
      coalesce(sum(slots), 0)::int as slots, coalesce(sum(busy), 0)::int as busy, coalesce(sum(free), 0)::int as free
    from hosts_now),
  host as (select avg(memory) as memory, sum(memory_taken) as taken from open_hosts()),
  waiting as (
    select sum(p.memory) as memory, extract(epoch from clock_timestamp() - min(p.placed_at)) as wait_s
    from placements p join runs r using (tenant, user_id, run_id) where p.host_id is null and r.gate = 'room')
  select q.*, coalesce(host.taken / host.memory, 0)::float8 as hosts_taken,
    coalesce(waiting.memory / host.memory, 0)::float8 as hosts_wanted, coalesce(waiting.wait_s, 0)::float8 as room_wait_s
  from ({_QUEUE}) q, host, waiting"""

Connection = AsyncConnection[Any]


async def read_load(connection: Connection, pool: str, *, on_hosts: bool = False) -> Load:
    """Read how loaded a pool is now, in one statement. Executors count while they beat and do not drain.

    ``on_hosts``: what is scaled are hosts. Executors of one host count as one then, and what sandboxes take counts, too.
    """
    cursor = connection.cursor(row_factory=dict_row)
    await cursor.execute(_HOSTS if on_hosts else _EXECUTORS, _PARAMETERS | {"pool": pool})
    row = await cursor.fetchone()
    assert row is not None
    return Load(**row)


async def take_scaling_turn(connection: Connection, pool: str, every_s: float) -> Memory | None:
    """What the last decision about the pool has left if it is ours to decide now; None if somebody has done so within
    ``every_s``: no two decide upon the same load."""
    cursor = await connection.execute(
        """insert into scaling as s (pool, due_at) values (%(pool)s, clock_timestamp() + make_interval(secs => %(every_s)s))
           on conflict (pool) do update set due_at = excluded.due_at where s.due_at <= clock_timestamp()
           returning out_at_s, low_since_s, low_peak""",
        {"pool": pool, "every_s": every_s},
    )
    row = await cursor.fetchone()
    return None if row is None else Memory(*row)


async def remember(connection: Connection, pool: str, memory: Memory) -> None:
    """Keep what a decision leaves for the next."""
    await connection.execute(
        "update scaling set out_at_s = %s, low_since_s = %s, low_peak = %s where pool = %s",
        (memory.out_at_s, memory.low_since_s, memory.low_peak, pool),
    )


async def busy_hosts(connection: Connection) -> set[str]:
    """Hosts that execute a run or have a sandbox: not to be taken."""
    cursor = await connection.execute(
        """select host_id from hosts where sandboxes > 0
           union select host_id from executors where busy > 0 and host_id is not null"""
    )
    return {host_id for (host_id,) in await cursor.fetchall()}


async def retire(
    connection: Connection, pool: str, count: int, for_s: float, newest: Set[str] | None = None
) -> None:
    """Let ``count`` executors (or hosts) of the pool take nothing more for ``for_s``, so that they become idle; the others
    take runs. Chosen are those that were before, then those with least to do.

    ``newest`` are tasks that replace all others: chosen are only those others, and they do not wait until they are idle. It ends by itself: without a scaler nobody stays retired.
    """
    await connection.execute(
        f"""with alive as (
              select executor_id, coalesce(host_id, executor_id) as host, busy, retiring_until > clock_timestamp() as retiring,
                %(newest)s::text[] is null or task is null or task <> all(%(newest)s) as may
              from {_ALIVE}),
            ranked as (
              select host, row_number() over (order by bool_or(coalesce(retiring, false)) desc, sum(busy), host) as place
              from alive where may group by host),
            chosen as (
              select executor_id, coalesce(place <= %(count)s, false) as retires from alive left join ranked using (host))
            update executors e set
              retiring_until = case when c.retires then clock_timestamp() + make_interval(secs => %(for_s)s) end,
              replaced = c.retires and %(newest)s::text[] is not null
            from chosen c where e.executor_id = c.executor_id and (c.retires or e.retiring_until is not null)""",
        {
            "pool": pool,
            "silent_s": _SILENT_AFTER_S,
            "count": count,
            "for_s": for_s,
            "newest": None if newest is None else list(newest),
        },
    )
