"""Forgetting what is old: idempotency keys, threads of stateless runs, journals, operations, sandboxes, parts that are gone."""

from typing import Any, LiteralString
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.store import sandboxes

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
