"""The sweep: what executors that died, and time itself, have left to do.

Every executor asks for the turn once a second, and so does a scheduled function in their absence. A pass looks with one
statement for what there is to do, mostly nothing. Each step is made of short transactions of bounded size, is right in any
number of copies at once, and gives way to the hot path: what waits too long for a lock is left to the next pass.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import groupby
from typing import Any, LiteralString, NamedTuple
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from sandfleet.shared.ids import RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.expiry import (
    BATCH,
    OLD_DAILY_USAGE,
    OLD_JOURNALS,
    OLD_KEYS,
    OLD_OPERATIONS,
    OLD_RUN_USAGE,
    OLD_SANDBOXES,
    OLD_THREADS,
    SILENT,
    expire_journals,
    expire_keys,
    expire_sandboxes,
    expire_threads,
    expire_usage,
    fold_usage,
    forget_operations,
    forget_silent,
)
from sandfleet.shared.store.placements import Need, give_room, hosts_that_could, waiting_for_room
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool
from sandfleet.shared.store.suspects import deaths_that_end
from sandfleet.shared.store.threads import lock
from sandfleet.shared.store.undoing import settle_interrupts, undo_run

_log = logging.getLogger(__name__)

Connection = AsyncConnection[Any]


class _Report(NamedTuple):
    """What a pass has led to: runs made ready, as rows of a gate function, and runs ended that somebody may watch."""

    ready: list[tuple[str | None, int]]
    ended: list[EndedRun]


_ROUNDS = 10  # batches of a kind in a pass
_PASS_S = 2.0  # no batch begins later in a pass: whoever sweeps has other duties

LIMITS = {"lock_timeout": "1s", "statement_timeout": "10s", "idle_in_transaction_session_timeout": "5s"}
"""Settings of a sweeping session: a pass waits for nobody for long, and nobody for one that was frozen in the middle of a
transaction."""

_TIMEOUT_GRACE_S = 10.0
"""How long after a run's time limit its executor may take to end the run; then the sweep does."""

_POISON = """{"error": "ExecutorLost", "message": "The executor died several times in a row while it ran this run, without a new checkpoint. Look for crashes (memory, native code) in the graph."}"""
_OVERDUE = """{"error": "RunTimeout", "message": "The run exceeded its time limit."}"""


class _Step(NamedTuple):
    """Work in batches, and the condition that says if there is any. ``work`` returns how many rows a batch had."""

    due: LiteralString
    work: Callable[[], Awaitable[int]]


async def set_limits(connection: Connection) -> None:
    """Put `LIMITS` in place, for a connection that was not opened with them."""
    for setting, limit in LIMITS.items():
        await connection.execute("select set_config(%s, %s, false)", (setting, limit))


async def sweep_as_configured(
    connection: Connection, settings: Settings, ended: list[EndedRun] | None = None
) -> ReadyRuns:
    """`sweep` by the settings of this process."""
    return await sweep(
        connection,
        settings.poison_limit,
        settings.lease_s,
        settings.idempotency_ttl_s,
        settings.journal_retention_s,
        usage_retention_s=settings.usage_retention_s,
        ended=ended,
    )


async def sweep(
    connection: Connection,
    poison_limit: int,
    lease_s: float,
    idempotency_ttl_s: float,
    journal_retention_s: float = 7 * 24 * 3600,
    *,
    usage_retention_s: float = 400 * 24 * 3600,
    ended: list[EndedRun] | None = None,
) -> ReadyRuns:
    """One pass. Returns the pools that got ready runs, whose executors should be woken.

    The runs that it ends are added to ``ended``, for those who watch them, also when it raises.

    ``connection`` is in autocommit mode, with `LIMITS`. No lease expires within one lease (``lease_s``) of a time when the
    database was away: nobody could renew then. Raises psycopg.Error when the connection is lost or the look fails; what
    else fails is logged, and the rest is done all the same.
    """
    report = _Report([], [] if ended is None else ended)
    deadline = time.monotonic() + _PASS_S
    lost: dict[str, Any] = {"poison_limit": deaths_that_end(poison_limit)}
    steps = [
        _Step(_ANY_EXPIRED, partial(_end_lost, connection, report, lost)),
        _Step(_ANY_EXPIRED, partial(_return_expired, connection, report, lost)),
        _Step(_ANY_LATE, partial(_end_overdue, connection, report)),
        _Step(_ANY_DUE, partial(_release_delays, connection, report)),
        _Step(_ANY_ROOM, partial(_fill_slots, connection, report)),
        _Step(_ANY_OUT_OF_ROOM, partial(_give_room, connection, report)),
        _Step(OLD_KEYS, partial(expire_keys, connection, idempotency_ttl_s)),
        _Step(OLD_THREADS, partial(expire_threads, connection)),
        _Step(OLD_JOURNALS, partial(expire_journals, connection, journal_retention_s)),
        _Step(OLD_OPERATIONS, partial(forget_operations, connection)),
        _Step(OLD_RUN_USAGE, partial(fold_usage, connection, journal_retention_s)),
        _Step(OLD_DAILY_USAGE, partial(expire_usage, connection, usage_retention_s)),
        _Step(OLD_SANDBOXES, partial(expire_sandboxes, connection)),
        _Step(SILENT, partial(forget_silent, connection)),
    ]
    cursor = await connection.execute(
        f"{_BEAT} select beat_at, array[{', '.join(f'coalesce({step.due}, false)' for step in steps)}] from beat",
        {
            "lease_s": lease_s,
            "pause_s": lease_s / 2,
            "grace_s": _TIMEOUT_GRACE_S,
            "idempotency_ttl_s": idempotency_ttl_s,
            "retention_s": journal_retention_s,
            "usage_retention_s": usage_retention_s,
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    lost["now"], found = row
    for step in (step for step, due in zip(steps, found, strict=True) if due):
        for _ in range(_ROUNDS):
            done = 0
            if time.monotonic() < deadline:
                async with _tolerant(connection):
                    done = await step.work()
            if done < BATCH:
                break
    return ready_by_pool(report.ready)


@asynccontextmanager
async def _tolerant(connection: Connection) -> AsyncIterator[None]:
    """Let one thing fail without the others: nothing may keep the sweep from returning leases."""
    try:
        yield
    except psycopg.Error as error:
        if connection.closed:
            raise
        _log.warning("a step of the sweep failed: %s", type(error).__name__)


# Sweeps come every second while the database answers, so a pause of half a lease says that it did not: it was frozen, cut
# off or stopped. One that is frozen shows it in no other way. (So it is when nobody swept; then a dead executor's runs wait
# for one lease more.) It is steady when it has answered for one lease without a pause.
# What the look finds, and what comes next in the sweep, counts leases as expired at the time of the beat, not at its own:
# the database may be frozen between.
_BEAT: LiteralString = """with beat as (
  insert into pulse as p (beat_at, steady_since) select n.now, n.now from (select clock_timestamp() as now) n
  on conflict (one) do update set beat_at = excluded.beat_at, steady_since =
    case when excluded.beat_at > p.beat_at + make_interval(secs => %(pause_s)s) then excluded.beat_at else p.steady_since end
  returning beat_at,
    beat_at >= greatest(steady_since, pg_postmaster_start_time()) + make_interval(secs => %(lease_s)s) as steady)"""

# Conditions of the look. The least of an indexed column is one step into the index, whatever the planner believes.
_ANY_EXPIRED: LiteralString = """(
  (select min(r.lease_expires_at) from runs r where r.status = 'running') < (select beat_at from beat where steady))"""
_ANY_DUE: LiteralString = "((select min(r.not_before) from runs r where r.gate = 'time') <= now())"
_ROOM: LiteralString = """tenants t where t.waiting > 0 and t.slots < t.max_in_flight
  and exists (select 1 from runs r where r.tenant = t.tenant and r.gate = 'tenant')"""
_ANY_ROOM: LiteralString = f"exists (select 1 from {_ROOM})"
_ANY_OUT_OF_ROOM: LiteralString = "exists (select 1 from runs r where r.gate = 'room')"

_EXPIRED: LiteralString = "r.status = 'running' and r.lease_expires_at < %(now)s"

# Deaths in a row without a new checkpoint, this one counted.
_DEATHS: LiteralString = """case when exists (select 1 from checkpoints c where c.tenant = r.tenant
  and c.user_id = r.user_id and c.thread_id = r.thread_id::text and c.run_id = r.run_id and c.attempt = r.attempt)
  then 1 else r.deaths + 1 end"""

_LOST: LiteralString = f"{_EXPIRED} and (r.cancel_action is not null or {_DEATHS} >= %(poison_limit)s)"


class _Doomed(NamedTuple):
    """Runs that must end: which, with the values that the condition names, and how unless they were to be cancelled."""

    condition: LiteralString
    values: dict[str, Any]
    status: str
    error: str


async def _end_lost(connection: Connection, report: _Report, lost: dict[str, Any]) -> int:
    """End the runs with an expired lease that must not go on: they were to be cancelled, or kill their executors."""
    return await _end_all(connection, report, _Doomed(_LOST, lost, "error", _POISON))


# A run that was never started waits without a limit: the time counts from the first start.
# One that was given back just when it was cancelled would wait for an executor to end it, and there may be none.
_LATE: LiteralString = """(r.status = 'pending' and r.started_at is not null and (
      r.cancel_action is not null or r.started_at < clock_timestamp() - make_interval(secs => r.timeout_s))
  or r.status = 'running' and r.started_at < clock_timestamp() - make_interval(secs => r.timeout_s + %(grace_s)s))"""

_ANY_LATE: LiteralString = f"exists (select 1 from runs r where {_LATE})"


async def _end_overdue(connection: Connection, report: _Report) -> int:
    """End the runs that are cancelled or over their time limit, and that no executor ends."""
    return await _end_all(
        connection, report, _Doomed(_LATE, {"grace_s": _TIMEOUT_GRACE_S}, "timeout", _OVERDUE)
    )


async def _end_all(connection: Connection, report: _Report, doomed: _Doomed) -> int:
    # In no order, so that those that cannot be ended for now are not all that is ever tried.
    cursor = await connection.execute(
        f"""select r.tenant, r.user_id, r.run_id, r.thread_id from runs r where {doomed.condition}
            order by random() limit {BATCH}""",
        doomed.values,
    )
    done = 0
    for *key, thread_id in await cursor.fetchall():
        async with _tolerant(connection):
            async with connection.transaction():
                over = await _end(connection, report, doomed, RunKey(*key), thread_id)
            if over is not None:  # and committed
                done += 1
                report.ended.extend(over)
    return done


async def _end(
    connection: Connection, report: _Report, doomed: _Doomed, key: RunKey, thread_id: UUID
) -> list[EndedRun] | None:
    """End one run if the condition still holds under the locks: its executor may have come back, and goes on then.

    Returns None in that case, and the run unless it is erased.
    """
    await lock(connection, key.owner, thread_id)
    cursor = await connection.execute(
        f"""select r.cancel_action from runs r where r.tenant = %(tenant)s and r.user_id = %(user_id)s
            and r.run_id = %(run_id)s and {doomed.condition} for update""",
        {**doomed.values, **key._asdict()},
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    cancel_action = row[0]
    status, error = ("interrupted", None) if cancel_action else (doomed.status, doomed.error)
    cursor = await connection.execute(
        "select ready_pool, ready_count, o_attempt from end_run(%s, %s, %s, %s, %s::json, %s)",
        (*key, status, error, TEMPORARY_KEEP_S),
    )
    rows = await cursor.fetchall()
    report.ready.extend([(pool, count) for pool, count, _ in rows])
    if cancel_action == "rollback":
        await undo_run(connection, key)
        return []
    await settle_interrupts(connection, key.owner, [key.run_id])
    return [EndedRun(key.run_id, rows[0][2], error)]


async def _return_expired(connection: Connection, report: _Report, lost: dict[str, Any]) -> int:
    """Make runs ready again whose executor is gone; they keep their place in the fair order."""
    cursor = await connection.execute(
        f"""
        with expired as materialized (
          select tenant, user_id, run_id from runs r where {_EXPIRED} and not ({_LOST})
          order by lease_expires_at limit {BATCH} for update skip locked)
        update runs r set status = 'pending', lease_owner = null, lease_expires_at = null, deaths = {_DEATHS},
          ready_at = clock_timestamp(), updated_at = clock_timestamp()
        from expired e where r.tenant = e.tenant and r.user_id = e.user_id and r.run_id = e.run_id
        returning r.pool, 1
        """,
        lost,
    )
    rows = await cursor.fetchall()
    report.ready.extend(rows)
    return len(rows)


async def _release_delays(connection: Connection, report: _Report) -> int:
    """Let runs whose delay is over to their threads, a tenant at a time."""
    cursor = await connection.execute(
        f"""select tenant, user_id, run_id from runs where gate = 'time' and not_before <= clock_timestamp()
            order by not_before limit {BATCH}"""
    )
    due = sorted(await cursor.fetchall())
    done = 0
    for tenant, rows in groupby(due, lambda row: row[0]):
        async with _tolerant(connection), connection.transaction():
            await connection.execute("select 1 from tenants where tenant = %s for update", (tenant,))
            keys = list(rows)
            cursor = await connection.execute(
                """with due as (
                     update runs r set gate = 'thread' from unnest(%s::text[], %s::uuid[]) d (user_id, run_id)
                     where r.tenant = %s and r.user_id = d.user_id and r.run_id = d.run_id and r.gate = 'time'
                     returning r.user_id, r.thread_id)
                   select user_id, thread_id, count(*) from due group by user_id, thread_id order by user_id, thread_id""",
                ([row[1] for row in keys], [row[2] for row in keys], tenant),
            )
            threads = await cursor.fetchall()
            cursor = await connection.execute(
                """select p.* from unnest(%s::text[], %s::uuid[]) with ordinality t (user_id, thread_id, n),
                   lateral (select * from pass_on(%s, t.user_id, t.thread_id) where t.n > 0) p""",
                ([row[0] for row in threads], [row[1] for row in threads], tenant),
            )
            report.ready.extend(await cursor.fetchall())
            done += sum(row[2] for row in threads)
    return done


async def _fill_slots(connection: Connection, report: _Report) -> int:
    """Give slots that a raised cap has made to runs that wait for one."""
    cursor = await connection.execute(f"select t.tenant from {_ROOM}")
    for (tenant,) in await cursor.fetchall():
        async with _tolerant(connection), connection.transaction():
            await connection.execute("select 1 from tenants where tenant = %s for update", (tenant,))
            cursor = await connection.execute("select * from pass_on(%s, null, null)", (tenant,))
            report.ready.extend(await cursor.fetchall())
    return 0


async def _give_room(connection: Connection, report: _Report) -> int:
    """Give room that hosts have to runs that wait for it."""
    refused: list[Need] = []  # what found no room; what needs more finds none either
    kept: list[str] = []
    given = 0
    for waiting in await waiting_for_room(connection, BATCH):
        if any(_as_large(waiting.need, other) for other in refused):
            continue
        async with _tolerant(connection):
            outcome, ready = await give_room(connection, waiting.key, kept)
            report.ready.extend(ready.items())
            given += outcome == "done"
            if outcome == "full":
                refused.append(waiting.need)
                if waiting.starving:
                    kept.extend(await hosts_that_could(connection, waiting.need))
    return given


def _as_large(need: Need, other: Need) -> bool:
    return need.template == other.template and need.memory >= other.memory and need.pids >= other.pids
