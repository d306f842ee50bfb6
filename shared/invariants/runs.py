"""The rules within PostgreSQL: runs, threads, tenants' counters, journals and tool calls, in one snapshot."""

import asyncio
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from sandfleet.shared.invariants import GONE_S, Violation
from sandfleet.shared.store.expiry import FORGET_S, UNREAPED_S

NEWEST = 50_000
"""Runs that are over and are looked at, the newest first, so that the check stays cheap beside millions of old ones."""

_SHOWN = 100  # violations of one rule that are reported
_STATEMENT_LIMIT_MS = 120_000


class Checked(NamedTuple):
    """What was looked at, and what is wrong. ``ready`` counts by pool the runs that an executor may take."""

    violations: list[Violation]
    live: int
    ended: int
    ready: dict[str, int]


# Every run that is not over is found by one of these arms, each of which has an index of its own.
_ARMS = (
    "status = 'running'",
    "status = 'pending' and gate is null",
    *(f"status = 'pending' and gate = '{gate}'" for gate in ("time", "thread", "tenant", "children", "room")),
)
_COLUMNS = "tenant, user_id, run_id, thread_id, pool, status, gate, not_before, vtime, ready_at, lease_owner, lease_expires_at"
_LIVE = f"with live as materialized ({' union all '.join(f'select {_COLUMNS} from runs where {arm}' for arm in _ARMS)})"
_ENDED = """with ended as materialized (
  select tenant, user_id, run_id, thread_id, attempt, lease_owner, lease_expires_at, gate, finished_at, journal_expired from runs
  where status not in ('pending', 'running'))"""
_ENDED_NEWEST = _ENDED.replace(
    "status not in ('pending', 'running')",
    "finished_at is not null and not journal_expired order by finished_at desc limit %(newest)s",
)

_THREAD = "t.tenant = r.tenant and t.user_id = r.user_id and t.thread_id = r.thread_id"
_RUN = "x.tenant = r.tenant and x.user_id = r.user_id and x.run_id = r.run_id"
_IN_TIME = "now() - make_interval(secs => %(gone_s)s)"

# rule: (what it reads, select of id and detail). now() is the begin of the transaction: no later than its snapshot.
_RULES = {
    "running run without a live lease": (
        _LIVE,
        f"""select r.run_id, case when r.lease_expires_at is null or r.lease_owner is null then 'it has no lease'
              else 'its lease has expired and nobody took it back' end
            from live r where r.status = 'running' and (r.lease_owner is null or r.lease_expires_at is null
              or greatest(r.lease_expires_at, pg_postmaster_start_time()) < {_IN_TIME})""",
    ),
    "pending run with a lease": (
        _LIVE,
        """select r.run_id, 'nobody should own it' from live r
           where r.status = 'pending' and (r.lease_owner is not null or r.lease_expires_at is not null)""",
    ),
    "gate without a reason": (
        _LIVE,
        f"""select r.run_id, 'gate ' || r.gate || ': ' || case r.gate
              when 'time' then 'its time has come' when 'thread' then 'no other live run holds the thread'
              when 'tenant' then 'the tenant has a free slot, or the run does not hold its thread'
              when 'room' then 'it is not noted as waiting, or does not hold its thread'
              else 'it waits for nothing, or runs' end
            from live r left join threads t on {_THREAD} left join tenants n on n.tenant = r.tenant
            where r.gate is not null and not coalesce(r.status = 'pending' and case r.gate
              when 'time' then r.not_before > {_IN_TIME}
              when 'thread' then exists (select 1 from runs x where x.tenant = t.tenant and x.user_id = t.user_id
                and x.run_id = t.active_run and x.run_id <> r.run_id and x.status in ('pending', 'running'))
              when 'tenant' then n.slots >= n.max_in_flight and t.active_run = r.run_id
              when 'room' then t.active_run = r.run_id and exists (
                select 1 from placements x where {_RUN} and x.host_id is null)
              else false end, false)""",
    ),
    "ready run out of order": (
        _LIVE,
        """select r.run_id, 'it has no place in the fair order' from live r
           where r.status = 'pending' and r.gate is null and (r.vtime is null or r.ready_at is null)""",
    ),
    "live run without its thread": (
        _LIVE,
        f"""select r.run_id, case when t.thread_id is null then 'the thread is missing'
              when t.status <> 'busy' then 'the thread says ' || t.status
              else 'the thread is held by ' || coalesce(t.active_run::text, 'nobody') end
            from live r left join threads t on {_THREAD}
            where t.status is distinct from 'busy' or r.gate is null and t.active_run is distinct from r.run_id""",
    ),
    "tenant's counters": (
        _LIVE,
        """select n.tenant, format('slots %%s, counted %%s; waiting %%s, counted %%s',
              n.slots, coalesce(c.slots, 0), n.waiting, coalesce(c.waiting, 0))
           from tenants n left join (select tenant, count(*) filter (where gate is null) as slots,
             count(*) filter (where gate is not null) as waiting from live group by tenant) c using (tenant)
           where (n.slots, n.waiting) is distinct from (coalesce(c.slots, 0)::int, coalesce(c.waiting, 0)::int)""",
    ),
    "ended run with a lease": (
        _ENDED,
        """select r.run_id, 'lease or gate is still there' from ended r
           where r.lease_owner is not null or r.lease_expires_at is not null or r.gate is not null or r.finished_at is null""",
    ),
    "ended run with an open tool call": (
        _ENDED,
        f"""select r.run_id, 'tool call ' || x.call_id from ended r join tool_calls x on {_RUN} where x.status = 'started'""",
    ),
    "ended run that holds its thread": (
        _ENDED,
        f"""select r.run_id, 'thread ' || t.thread_id from ended r join threads t on {_THREAD} where t.active_run = r.run_id""",
    ),
    "busy thread without a live run": (
        _ENDED,
        f"""select distinct t.thread_id, 'no run of it is live' from ended r join threads t on {_THREAD}
            where t.status = 'busy' and not exists (select 1 from runs x where x.tenant = r.tenant
              and x.user_id = r.user_id and x.thread_id = r.thread_id and x.status in ('pending', 'running'))""",
    ),
    "journal of an ended run": (
        _ENDED,
        """select r.run_id, case when j.ends <> 1 then format('%%s end events', j.ends)
              when not j.ends_last then 'end is not the last event' else 'an attempt does not begin with its first event' end
           from ended r cross join lateral (
             select count(*) filter (where e.event = 'end') as ends,
               coalesce((array_agg(e.event order by e.attempt desc, e.seq desc))[1] = 'end'
                 and max(e.attempt) = r.attempt, false) as ends_last,
               r.journal_expired or count(distinct e.attempt) = count(*) filter (where e.seq = 0) as begins
             from journal e where e.tenant = r.tenant and e.user_id = r.user_id and e.run_id = r.run_id) j
           where j.ends <> 1 or not j.ends_last or not j.begins""",
    ),
    "usage of an attempt that there never was": (
        _ENDED,
        f"""select r.run_id, 'attempt ' || x.attempt from ended r join run_usage x on {_RUN} where x.attempt > r.attempt""",
    ),
    "run that waits beside room": (
        "",
        f"""select run_id, 'it has waited longest, and ' || room || ' has room' from (
              select p.*, choice.host_id as room from placements p join runs r using (tenant, user_id, run_id) left join lateral (
                select h.host_id from open_hosts() h where host_takes(h, p.template, p.memory, p.pids) limit 1) choice on true
              where p.host_id is null and r.gate = 'room' order by p.placed_at limit 1) head
            where placed_at < {_IN_TIME} and room is not null""",
    ),
    "placement of a run that is over": (
        "",
        """select p.run_id, coalesce('on ' || p.host_id, 'it waits for room') from placements p
           left join runs r using (tenant, user_id, run_id)
           left join sandboxes s on s.tenant = p.tenant and s.user_id = p.user_id and s.sandbox_id = p.run_id
           where s.sandbox_id is null and (r.run_id is null or r.status not in ('pending', 'running'))""",
    ),
    "sandbox of a run that is over": (
        "",
        """select r.run_id, 'on ' || h.host_id from hosts h cross join lateral jsonb_array_elements(h.held) x (of)
           join runs r on r.tenant = x.of->>0 and r.user_id = x.of->>1 and r.run_id = (x.of->>2)::uuid
           where r.finished_at < h.heartbeat_at - make_interval(secs => %(gone_s)s)""",
    ),
    "sandbox beyond its time": (
        "",
        f"select sandbox_id, 'nobody has removed it' from sandboxes where expires_at < {_IN_TIME}",
    ),
    "executor that is gone": (
        "",
        """select executor_id, 'silent for a long time' from executors
            where heartbeat_at < now() - make_interval(secs => %(forget_s)s + %(gone_s)s)""",
    ),
    "sandbox host that is gone": (
        "",
        """select host_id, 'silent for a long time' from hosts where heartbeat_at
            < now() - make_interval(secs => case when folder is null then %(forget_s)s else %(unreaped_s)s end + %(gone_s)s)""",
    ),
}


_MAY_BE_NEW = "run that waits beside room"  # the room may have come this moment: it counts if it is so twice
_LOOK_AGAIN_S = 5.0


async def check_runs(connection: AsyncConnection[Any], newest: int | None = NEWEST) -> Checked:
    """Hold the database against every rule, in one read-only snapshot, which locks nothing and nobody.

    Runs that are not over are all looked at; of those that are, the ``newest`` (None: all). ``connection`` is in
    autocommit mode.
    """
    values = {"newest": newest, "gone_s": GONE_S, "forget_s": FORGET_S, "unreaped_s": UNREAPED_S}
    violations: list[Violation] = []
    async with connection.transaction():
        await connection.execute("set transaction isolation level repeatable read, read only")
        await connection.execute(f"set local statement_timeout = {_STATEMENT_LIMIT_MS}")
        for rule, (source, select) in _RULES.items():
            prefix = _ENDED_NEWEST if source == _ENDED and newest is not None else source
            violations += await _broken(connection, rule, f"{prefix} {select}", values)
        cursor = await connection.execute(f"{_LIVE} select count(*) from live")
        live = await cursor.fetchone()
        cursor = await connection.execute(
            "select pool, count(*) from runs where status = 'pending' and gate is null group by pool"
        )
        ready = dict(await cursor.fetchall())
        prefix = _ENDED if newest is None else _ENDED_NEWEST
        cursor = await connection.execute(f"{prefix} select count(*) from ended", values)
        ended = await cursor.fetchone()
    assert live is not None
    assert ended is not None
    if any(violation.rule == _MAY_BE_NEW for violation in violations):
        await asyncio.sleep(_LOOK_AGAIN_S)
        again = await _broken(connection, _MAY_BE_NEW, "".join(_RULES[_MAY_BE_NEW]), values)
        violations = [v for v in violations if v.rule != _MAY_BE_NEW or v in again]
    return Checked(violations, live[0], ended[0], ready)


async def _broken(
    connection: AsyncConnection[Any], rule: str, select: str, values: dict[str, Any]
) -> list[Violation]:
    cursor = await connection.execute(f"{select} limit {_SHOWN}", values)
    return [Violation(rule, str(id_), detail) for id_, detail in await cursor.fetchall()]
