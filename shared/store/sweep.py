"""The sweep: what executors that died, and time itself, have left to do. Bounded work per pass, safe in many copies."""

from datetime import datetime
from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.claims import end_attempt
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool

Connection = AsyncConnection[Any]
Ready = tuple[str | None, int]

FORGET_S = 300.0
"""Executors and sandbox hosts that have been silent for so long are forgotten; one that comes back registers again."""

_LOCK = 7_261_302  # one sweep at a time in a database
_BATCH = 100  # rows of each kind in a pass

_POISON = """{"error": "ExecutorLost", "message": "The executor died several times in a row while it ran this run, without a new checkpoint. Look for crashes (memory, native code) in the graph."}"""


async def sweep(
    connection: Connection, poison_limit: int, lease_s: float, idempotency_ttl_s: float
) -> ReadyRuns:
    """One pass; does nothing while another sweep is at work. Returns the pools that got ready runs.

    ``connection`` is in autocommit mode: each step is a transaction of its own, so that the sweep never holds a run's
    row while it waits for a tenant's, and the lock that keeps sweeps apart is the session's.
    No lease expires within one lease (``lease_s``) of a time when the database was away: nobody could renew then.
    """
    cursor = await connection.execute("select pg_try_advisory_lock(%s)", (_LOCK,))
    row = await cursor.fetchone()
    if row is None or not row[0]:
        return {}
    try:
        ready: list[Ready] = []
        now = await _beat(connection, lease_s)
        if now is not None:
            ready += await _end_lost(connection, poison_limit, now)
            ready += await _return_expired(connection, now)
        ready += await _due_delays(connection)
        await _expired_rows(connection, idempotency_ttl_s)
    finally:
        await connection.execute("select pg_advisory_unlock(%s)", (_LOCK,))
    return ready_by_pool(ready)


# Sweeps come every second while the database answers, so a pause of half a lease says that it did not: it was frozen, cut
# off or stopped. One that is frozen shows it in no other way. (So it is when nobody swept; then a dead executor's runs wait
# for one lease more.)
_BEAT = """
  insert into pulse as p (beat_at, steady_since) select n.now, n.now from (select clock_timestamp() as now) n
  on conflict (one) do update set beat_at = excluded.beat_at, steady_since =
    case when excluded.beat_at > p.beat_at + make_interval(secs => %(pause_s)s) then excluded.beat_at else p.steady_since end
  returning beat_at, beat_at >= greatest(steady_since, pg_postmaster_start_time()) + make_interval(secs => %(lease_s)s)"""


async def _beat(connection: Connection, lease_s: float) -> datetime | None:
    """The database's time now, if it has answered for one lease without a pause; else None.

    What comes next in the sweep counts leases as expired at this time, not at its own: the database may be frozen between.
    """
    cursor = await connection.execute(_BEAT, {"lease_s": lease_s, "pause_s": lease_s / 2})
    row = await cursor.fetchone()
    assert row is not None
    return row[0] if row[1] else None


_EXPIRED = "r.status = 'running' and r.lease_expires_at < %(now)s"

# Deaths in a row without a new checkpoint, this one counted.
_DEATHS = """case when exists (select 1 from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id
  and c.thread_id = r.thread_id::text and c.run_id = r.run_id and c.attempt = r.attempt) then 1 else r.deaths + 1 end"""


async def _end_lost(connection: Connection, poison_limit: int, now: datetime) -> list[Ready]:
    """End the runs with an expired lease that must not go on: they were to be cancelled, or kill their executors."""
    cursor = await connection.execute(
        f"""select tenant, user_id, run_id, attempt, cancel_action from runs r
            where {_EXPIRED} and (cancel_action is not null or {_DEATHS} >= %(poison_limit)s) limit %(batch)s""",
        {"now": now, "poison_limit": poison_limit, "batch": _BATCH},
    )
    ready: list[Ready] = []
    for tenant, user_id, run_id, attempt, cancel_action in await cursor.fetchall():
        status, error = ("interrupted", None) if cancel_action else ("error", _POISON)
        fence = Fence(RunKey(tenant, user_id, run_id), attempt)
        _, woken = await end_attempt(connection, fence, status, error, rollback=cancel_action == "rollback")
        ready += woken.items()
    return ready


async def _return_expired(connection: Connection, now: datetime) -> list[Ready]:
    """Make runs ready again whose executor is gone; they keep their place in the fair order."""
    cursor = await connection.execute(
        f"""
        with expired as materialized (
          select tenant, user_id, run_id from runs r where {_EXPIRED}
          order by lease_expires_at limit %(batch)s for update skip locked)
        update runs r set status = 'pending', lease_owner = null, lease_expires_at = null, deaths = {_DEATHS},
          ready_at = clock_timestamp(), updated_at = clock_timestamp()
        from expired e where r.tenant = e.tenant and r.user_id = e.user_id and r.run_id = e.run_id
        returning r.pool, 1
        """,
        {"now": now, "batch": _BATCH},
    )
    return await cursor.fetchall()


async def _due_delays(connection: Connection) -> list[Ready]:
    cursor = await connection.execute(
        "select tenant, user_id, run_id, thread_id from runs where gate = 'time' and not_before <= clock_timestamp() order by not_before limit %s",
        (_BATCH,),
    )
    ready: list[Ready] = []
    for tenant, user_id, run_id, thread_id in await cursor.fetchall():
        async with connection.transaction():
            await connection.execute("select 1 from tenants where tenant = %s for update", (tenant,))
            await connection.execute(
                "update runs set gate = 'thread' where tenant = %s and user_id = %s and run_id = %s and gate = 'time'",
                (tenant, user_id, run_id),
            )
            passed = await connection.execute(
                "select * from pass_on(%s, %s, %s)", (tenant, user_id, thread_id)
            )
            ready += await passed.fetchall()
    return ready


async def _expired_rows(connection: Connection, idempotency_ttl_s: float) -> None:
    """Forget old idempotency keys, and the threads of stateless runs with all that is theirs."""
    await connection.execute(
        "delete from idempotency_keys where ctid = any(array(select ctid from idempotency_keys"
        " where created_at < clock_timestamp() - make_interval(secs => %s) limit %s))",
        (idempotency_ttl_s, _BATCH),
    )
    cursor = await connection.execute(
        "select tenant, user_id, thread_id from threads where expires_at < clock_timestamp() and status <> 'busy' limit %s",
        (_BATCH,),
    )
    for key in await cursor.fetchall():
        await connection.execute("select erase_thread(%s, %s, %s)", key)
    for table in ("executors", "hosts"):
        await connection.execute(
            f"delete from {table} where heartbeat_at < clock_timestamp() - make_interval(secs => %s)",
            (FORGET_S,),
        )
