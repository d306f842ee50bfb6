"""Forgetting what is old: idempotency keys, threads of stateless runs, journals, operations, sandboxes, parts that are gone.
What is old of usage is added up by day first."""

from typing import Any, LiteralString
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.store import sandboxes
from sandfleet.shared.store.usage import ADDED, COLUMNS

Connection = AsyncConnection[Any]

FORGET_S = 300.0
"""Executors and sandbox hosts that have been silent for so long are forgotten; one that comes back registers again.
An operation that ended so long ago has lost the API process that waited for it."""

UNREAPED_S = 24 * 3600.0
"""Hosts that have a folder are forgotten after so long only: before that another host of the same machine removes what is
in it, and forgets them itself."""

BATCH = 100
"""Rows of a kind that are handled at a time. Each function here returns how many there were."""

# Whether there is anything to do. The least of an indexed column is one step into the index.
OLD_KEYS: LiteralString = """(
  (select min(created_at) from idempotency_keys) < now() - make_interval(secs => %(idempotency_ttl_s)s))"""
OLD_THREADS: LiteralString = """(
  (select min(expires_at) from threads where expires_at is not null and status <> 'busy') < now())"""
OLD_JOURNALS: LiteralString = """(
  (select min(finished_at) from runs where finished_at is not null and not journal_expired)
    < now() - make_interval(secs => %(retention_s)s))"""
OLD_OPERATIONS: LiteralString = f"""(
  (select min(finished_at) from runs where kind <> 'run' and finished_at is not null)
    < now() - make_interval(secs => {FORGET_S}))"""
OLD_SANDBOXES: LiteralString = "((select min(expires_at) from sandboxes) < now())"
# A day more: a run begins before it ends. Those that are left when their day comes wait for runs that took longer.
OLD_RUN_USAGE: LiteralString = """((select min(day) from run_usage)
  < ((now() - make_interval(secs => %(retention_s)s)) at time zone 'UTC')::date - 1)"""
OLD_DAILY_USAGE: LiteralString = """((select min(day) from daily_usage)
  < ((now() - make_interval(secs => %(usage_retention_s)s)) at time zone 'UTC')::date)"""
SILENT: LiteralString = f"""(
  (select least((select min(heartbeat_at) from executors), (select min(heartbeat_at) from hosts where folder is null)))
    < now() - make_interval(secs => {FORGET_S})
  or (select min(heartbeat_at) from hosts) < now() - make_interval(secs => {UNREAPED_S}))"""


async def expire_keys(connection: Connection, idempotency_ttl_s: float) -> int:
    """Forget old idempotency keys."""
    cursor = await connection.execute(
        """delete from idempotency_keys where (tenant, user_id, key) in (
             select tenant, user_id, key from idempotency_keys
             where created_at < clock_timestamp() - make_interval(secs => %s)
             order by created_at limit %s for update skip locked)""",
        (idempotency_ttl_s, BATCH),
    )
    return cursor.rowcount


async def expire_threads(connection: Connection) -> int:
    """Remove the threads of stateless runs that nobody can ask for any more, with all that is theirs."""
    cursor = await connection.execute(
        """select tenant, user_id, thread_id from threads
           where expires_at < clock_timestamp() and status <> 'busy' order by expires_at limit %s""",
        (BATCH,),
    )
    keys: list[tuple[str, str, UUID]] = await cursor.fetchall()
    for key in keys:
        async with connection.transaction():
            # Looked at again under the lock: a run may just have been accepted on it.
            cursor = await connection.execute(
                """select 1 from threads where tenant = %s and user_id = %s and thread_id = %s
                   and expires_at < clock_timestamp() and status <> 'busy' for update skip locked""",
                key,
            )
            if await cursor.fetchone():
                await connection.execute("select erase_thread(%s, %s, %s)", key)
    return len(keys)


async def expire_journals(connection: Connection, retention_s: float) -> int:
    """Remove the journals of runs that ended long ago, but for their ``end``: a stream of such a run still ends."""
    cursor = await connection.execute(
        """with old as materialized (
             select tenant, user_id, run_id from runs
             where finished_at < clock_timestamp() - make_interval(secs => %s) and not journal_expired
             order by finished_at limit %s for update skip locked),
           gone as (
             delete from journal j using old
             where j.tenant = old.tenant and j.user_id = old.user_id and j.run_id = old.run_id and j.event <> 'end')
           update runs r set journal_expired = true from old
           where r.tenant = old.tenant and r.user_id = old.user_id and r.run_id = old.run_id""",
        (retention_s, BATCH),
    )
    return cursor.rowcount


async def forget_operations(connection: Connection) -> int:
    """Remove the traces of operations whose API process ended before it could."""
    cursor = await connection.execute(
        """with left_over as materialized (
             select tenant, user_id, run_id from runs
             where kind <> 'run' and finished_at < clock_timestamp() - make_interval(secs => %s)
             order by finished_at limit %s for update skip locked),
           gone as (
             delete from journal j using left_over o
             where j.tenant = o.tenant and j.user_id = o.user_id and j.run_id = o.run_id)
           delete from runs r using left_over o
           where r.tenant = o.tenant and r.user_id = o.user_id and r.run_id = o.run_id""",
        (FORGET_S, BATCH),
    )
    return cursor.rowcount


_FOLDED = 1000  # rows of usage that are added up at a time: they are small


async def fold_usage(connection: Connection, retention_s: float) -> int:
    """Add up by day what attempts have used whose run is forgotten, or its events are: nobody writes such a row again."""
    cursor = await connection.execute(
        f"""with old as materialized (
             select tenant, user_id, run_id, attempt, model from run_usage u
             where day < ((clock_timestamp() - make_interval(secs => %s)) at time zone 'UTC')::date - 1
               and not exists (select 1 from runs r where r.tenant = u.tenant and r.user_id = u.user_id
                 and r.run_id = u.run_id and not r.journal_expired)
             order by day limit {_FOLDED} for update skip locked),
           gone as (
             delete from run_usage u using old o where u.tenant = o.tenant and u.user_id = o.user_id
               and u.run_id = o.run_id and u.attempt = o.attempt and u.model = o.model returning u.*),
           added as (
             insert into daily_usage as d (tenant, day, user_id, model, {COLUMNS})
             select tenant, day, user_id, model, {ADDED} from gone group by tenant, day, user_id, model
             on conflict (tenant, day, user_id, model) do update set
               calls = d.calls + excluded.calls,
               unmetered_calls = d.unmetered_calls + excluded.unmetered_calls,
               unpriced_calls = d.unpriced_calls + excluded.unpriced_calls,
               input_tokens = d.input_tokens + excluded.input_tokens,
               output_tokens = d.output_tokens + excluded.output_tokens,
               cache_read_tokens = d.cache_read_tokens + excluded.cache_read_tokens,
               cache_creation_tokens = d.cache_creation_tokens + excluded.cache_creation_tokens,
               cost_usd = d.cost_usd + excluded.cost_usd)
           select count(*) from gone""",
        (retention_s,),
    )
    row = await cursor.fetchone()
    assert row is not None
    folded: int = row[0]
    return folded


async def expire_usage(connection: Connection, retention_s: float) -> int:
    """Forget the oldest sums of usage."""
    cursor = await connection.execute(
        f"""delete from daily_usage where (tenant, day, user_id, model) in (
             select tenant, day, user_id, model from daily_usage
             where day < ((clock_timestamp() - make_interval(secs => %s)) at time zone 'UTC')::date
             order by day limit {_FOLDED} for update skip locked)""",
        (retention_s,),
    )
    return cursor.rowcount


async def expire_sandboxes(connection: Connection) -> int:
    """Remove sandboxes without a run whose time is over; their hosts see that nobody owns them any more."""
    return await sandboxes.expire(connection, BATCH)


async def forget_silent(connection: Connection) -> int:
    """Forget executors and sandbox hosts that have died: they could not sign off."""
    silent = "heartbeat_at < clock_timestamp() - make_interval(secs => %s)"
    await connection.execute(f"delete from executors where {silent}", (FORGET_S,))
    await connection.execute(
        f"delete from hosts where {silent} and (folder is null or {silent})", (FORGET_S, UNREAPED_S)
    )
    return 0
