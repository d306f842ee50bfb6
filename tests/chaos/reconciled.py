"""That nothing is left of runs which are over: counters, threads, leases and ledger, as PostgreSQL has them."""

from typing import Any

import psycopg

_CHECKS = {
    "a terminal run holds a lease or waits at a gate": """
      select run_id, status from runs where status not in ('pending', 'running')
        and (lease_owner is not null or lease_expires_at is not null or gate is not null)""",
    "a terminal run has an open tool call": """
      select r.run_id, c.name from tool_calls c join runs r using (tenant, user_id, run_id)
      where c.status = 'started' and r.status not in ('pending', 'running')""",
    "a tool call has no run": """
      select c.run_id from tool_calls c left join runs r using (tenant, user_id, run_id) where r.run_id is null""",
    "a journal has no run": """
      select distinct j.run_id from journal j left join runs r using (tenant, user_id, run_id) where r.run_id is null""",
    "a run's journal does not end with its end": """
      select r.run_id, h.event from runs r left join lateral (
        select event from journal j where j.tenant = r.tenant and j.user_id = r.user_id and j.run_id = r.run_id
        order by attempt desc, seq desc limit 1) h on true
      where r.status not in ('pending', 'running') and h.event is distinct from 'end'""",
    "a thread is busy without a run, or idle with one": """
      select t.thread_id, t.status, t.active_run from threads t
      where (t.status = 'busy') <> exists (
        select 1 from runs r where r.tenant = t.tenant and r.user_id = t.user_id and r.thread_id = t.thread_id
          and r.status in ('pending', 'running'))""",
    "a thread is held by a run that is over": """
      select t.thread_id, t.active_run from threads t left join runs r
        on r.tenant = t.tenant and r.user_id = t.user_id and r.run_id = t.active_run
      where t.active_run is not null and (r.run_id is null or r.status not in ('pending', 'running'))""",
    "a tenant's counters are not what there is": """
      select t.tenant, t.slots, t.waiting, n.slots, n.waiting from tenants t, lateral (
        select count(*) filter (where status = 'running' or gate is null) as slots,
               count(*) filter (where status = 'pending' and gate is not null) as waiting
        from runs r where r.tenant = t.tenant and r.status in ('pending', 'running')) n
      where t.slots <> n.slots or t.waiting <> n.waiting""",
}


async def left_over(database_url: str) -> list[str]:
    """What is left, a line per kind with the first few rows."""
    found = []
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        for what, query in _CHECKS.items():
            rows: list[Any] = await (await connection.execute(query)).fetchall()
            if rows:
                found.append(f"{what} ({len(rows)} times): {rows[:5]}")
    return found
