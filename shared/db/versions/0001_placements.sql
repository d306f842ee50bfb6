-- Placement of sandboxes: which host, and what happens when none has room. Lock order: tenant, run, placement, decision.

-- What a host's sandboxes take: what was placed there, or what it said at its last beat and was placed there since.
-- The latter counts what has no placement any more but is not removed yet.
create function host_taken(h hosts) returns table (memory bigint, pids bigint, sandboxes bigint) language sql stable as $$
  select greatest(coalesce(sum(p.memory), 0), h.memory_taken + coalesce(sum(p.memory) filter (where p.placed_at > h.heartbeat_at), 0))::bigint,
         greatest(coalesce(sum(p.pids), 0), h.pids_taken + coalesce(sum(p.pids) filter (where p.placed_at > h.heartbeat_at), 0))::bigint,
         greatest(count(p), h.sandboxes + count(p) filter (where p.placed_at > h.heartbeat_at))
  from placements p where p.host_id = h.host_id
$$;

-- Hosts that take new sandboxes: they have answered within five of their beats.
create function open_hosts() returns setof hosts language sql stable as $$
  select * from hosts where not draining and heartbeat_at > clock_timestamp() - interval '10 seconds'
$$;

-- Whether a sandbox of these limits fits on a host. An empty host takes one of any size.
create function host_fits(h hosts, p_memory bigint, p_pids bigint) returns boolean language sql stable as $$
  select t.sandboxes = 0 or t.sandboxes < h.most and t.memory + p_memory <= h.memory and t.pids + p_pids <= h.pids from host_taken(h) t
$$;

-- The host for a new sandbox: the asking executor's own if it has room, else the emptiest that has; null if none has.
-- One decision at a time, until the end of the transaction, so that nobody else counts on the same room.
-- Unless p_near, any machine will do.
create function choose_host(p_memory bigint, p_pids bigint, p_own text, p_refused text[], p_near boolean) returns text language plpgsql as $$
begin
  perform pg_advisory_xact_lock(hashtext('sandfleet placement'));
  return (
    select h.host_id from open_hosts() h, lateral host_taken(h) t
    where h.host_id <> all (p_refused) and (not p_near or h.remote is not null or h.host_id = p_own) and host_fits(h, p_memory, p_pids)
    order by h.host_id is not distinct from p_own desc, h.memory - t.memory desc, h.host_id limit 1);
end $$;

-- Where the sandbox of a run is, or is to be made. p_own is the host of the asking executor's machine, p_refused are hosts that
-- had no room or did not answer. outcome: placed | full | away | no_host | superseded ('away': its host does not answer now,
-- but may come back with the sandbox; 'full': the run is noted as waiting for room).
create function place_sandbox(
  p_tenant text, p_user text, p_run uuid, p_attempt int, p_template text, p_memory bigint, p_pids bigint, p_own text, p_refused text[])
returns table (outcome text, o_host text, o_address text, o_remote text, o_sandbox text) language plpgsql as $$
declare
  p placements;
  h hosts;
  c text;
begin
  perform 1 from runs where tenant = p_tenant and user_id = p_user and run_id = p_run and attempt = p_attempt and status = 'running' for share;
  if not found then
    return query select 'superseded', null::text, null::text, null::text, null::text;
    return;
  end if;
  select * into p from placements where tenant = p_tenant and user_id = p_user and run_id = p_run for update;
  select * into h from hosts where host_id = p.host_id;
  if h.host_id is not null and h.host_id <> all (p_refused) then
    return query select 'placed', h.host_id, h.address, h.remote, p.sandbox_id;
    return;
  end if;
  if h.host_id is not null and p.sandbox_id is not null and h.heartbeat_at > clock_timestamp() - interval '60 seconds' then
    return query select 'away', h.host_id, h.address, h.remote, p.sandbox_id;
    return;
  end if;
  c := choose_host(p_memory, p_pids, p_own, p_refused, true);
  insert into placements as old (tenant, user_id, run_id, host_id, template, memory, pids) values (p_tenant, p_user, p_run, c, p_template, p_memory, p_pids)
    on conflict (tenant, user_id, run_id) do update set host_id = excluded.host_id, template = excluded.template,
      memory = excluded.memory, pids = excluded.pids,
      placed_at = case when excluded.host_id is null and old.host_id is null then old.placed_at else excluded.placed_at end;
  if c is null then
    return query select case when exists (select 1 from open_hosts()) then 'full' else 'no_host' end, null::text, null::text, null::text, null::text;
    return;
  end if;
  return query select 'placed', x.host_id, x.address, x.remote, p.sandbox_id from hosts x where x.host_id = c;
end $$;

-- The executor that holds a run gives it back, because no host has room: it waits at the gate, without a slot. One that is to
-- be cancelled becomes ready instead, so that an executor ends it. outcome: done | superseded.
create function suspend_for_room(p_tenant text, p_user text, p_run uuid, p_attempt int)
returns table (outcome text, ready_pool text, ready_count int) language plpgsql as $$
declare
  r runs;
begin
  perform 1 from tenants where tenant = p_tenant for update;
  update runs x set status = 'pending', lease_owner = null, lease_expires_at = null, updated_at = clock_timestamp(), ready_at = clock_timestamp(),
      gate = case when cancel_action is null and exists (
        select 1 from placements p where p.tenant = x.tenant and p.user_id = x.user_id and p.run_id = x.run_id and p.host_id is null) then 'room' end,
      deaths = case when exists (
        select 1 from checkpoints c where c.tenant = x.tenant and c.user_id = x.user_id and c.thread_id = x.thread_id::text
          and c.run_id = x.run_id and c.attempt = x.attempt) then 0 else deaths end
    where tenant = p_tenant and user_id = p_user and run_id = p_run and attempt = p_attempt and status = 'running'
    returning * into r;
  if not found then
    return query select 'superseded', null::text, 0;
  elsif r.gate is null then
    return query select 'done', r.pool, 1;
  else
    update tenants set slots = slots - 1, waiting = waiting + 1 where tenant = p_tenant;
    return query select 'done', c.ready_pool, c.ready_count from pass_on(p_tenant, null, null) c union all select 'done', null::text, 0;
  end if;
end $$;

-- Give a run that waits for room its place, and let it on to a slot. outcome: done | full | gone ('gone': it waits no more).
create function give_room(p_tenant text, p_user text, p_run uuid)
returns table (outcome text, ready_pool text, ready_count int) language plpgsql as $$
declare
  p placements;
  c text;
begin
  perform 1 from tenants where tenant = p_tenant for update;
  perform 1 from runs where tenant = p_tenant and user_id = p_user and run_id = p_run and gate = 'room' for update;
  if found then
    select * into p from placements where tenant = p_tenant and user_id = p_user and run_id = p_run for update;
  end if;
  if p.run_id is null then
    return query select 'gone', null::text, 0;
    return;
  end if;
  c := choose_host(p.memory, p.pids, null, '{}', false);
  if c is null then
    return query select 'full', null::text, 0;
    return;
  end if;
  update placements set host_id = c, placed_at = clock_timestamp() where tenant = p_tenant and user_id = p_user and run_id = p_run;
  update runs set gate = 'tenant' where tenant = p_tenant and user_id = p_user and run_id = p_run;
  return query select 'done', g.ready_pool, g.ready_count from pass_on(p_tenant, null, null) g union all select 'done', null::text, 0;
end $$;
