-- A sandbox is placed only on a host that can make it and has the disk that it may fill. Lock order as in 0001: tenant, run,
-- placement, decision. What has the same name in 0001 with fewer arguments is for what still runs of the version before.

-- Snapshots that were asked for and that a tenant may keep; null: as SANDFLEET_TENANT_MAX_SNAPSHOTS says.
alter table tenants add column max_snapshots int check (max_snapshots >= 0);

-- Bytes for workspaces on disk that a host gives, and that its sandboxes may fill; null: a host that does not count them.
alter table hosts add column disk bigint, add column disk_taken bigint;

-- Whether a host makes sandboxes of a template; one that says nothing of templates is taken to.
create function host_makes(h hosts, p_template text) returns boolean language sql immutable as $$
  select coalesce(h.templates ? p_template, true)
$$;

-- What a sandbox of a template may fill of a host's disk.
create function host_disk_need(h hosts, p_template text) returns bigint language sql immutable as $$
  select coalesce((h.templates -> p_template ->> 'disk')::bigint, 0)
$$;

-- What a host's sandboxes may fill of its disk, as host_taken counts memory.
create function host_disk_taken(h hosts) returns bigint language sql stable as $$
  select greatest(coalesce(sum(d.need), 0),
      coalesce(h.disk_taken, 0) + coalesce(sum(d.need) filter (where p.placed_at > h.heartbeat_at), 0))::bigint
  from placements p, lateral host_disk_need(h, p.template) d (need) where p.host_id = h.host_id
$$;

-- Whether a host takes a sandbox of a template. An empty one takes one of any size, but no disk has more than it has.
create function host_takes(h hosts, p_template text, p_memory bigint, p_pids bigint) returns boolean language sql stable as $$
  select host_makes(h, p_template) and host_fits(h, p_memory, p_pids)
    and (h.disk is null or host_disk_need(h, p_template) = 0 or host_disk_taken(h) + host_disk_need(h, p_template) <= h.disk)
$$;

-- As choose_host in 0001, among the hosts that can make the template. If none can that was heard of within a minute, any will
-- do: it says what it lacks.
create function choose_host(p_template text, p_memory bigint, p_pids bigint, p_own text, p_refused text[], p_near boolean)
returns text language plpgsql as $$
declare
  nobody boolean;
begin
  perform pg_advisory_xact_lock(hashtext('sandfleet placement'));
  nobody := not exists (
    select 1 from hosts h where host_makes(h, p_template) and h.heartbeat_at > clock_timestamp() - interval '60 seconds');
  return (
    select h.host_id from open_hosts() h, lateral host_taken(h) t
    where h.host_id <> all (p_refused) and (not p_near or h.remote is not null or h.host_id = p_own)
      and (host_takes(h, p_template, p_memory, p_pids) or nobody and host_fits(h, p_memory, p_pids))
    order by h.host_id is not distinct from p_own desc, h.memory - t.memory desc, h.host_id limit 1);
end $$;

-- As in 0001, with the template. A host that takes nothing more and has ended the run's sandbox has noted 'ended' in its place.
create or replace function place_sandbox(
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
  if h.host_id is not null and p.sandbox_id <> 'ended' and h.heartbeat_at > clock_timestamp() - interval '60 seconds' then
    return query select 'away', h.host_id, h.address, h.remote, p.sandbox_id;
    return;
  end if;
  c := choose_host(p_template, p_memory, p_pids, p_own, p_refused, true);
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

-- As in 0001, with the template, and not on the hosts in p_kept, whose room is kept for somebody else.
create function give_room(p_tenant text, p_user text, p_run uuid, p_kept text[])
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
  c := choose_host(p.template, p.memory, p.pids, null, p_kept, false);
  if c is null then
    return query select 'full', null::text, 0;
    return;
  end if;
  update placements set host_id = c, placed_at = clock_timestamp() where tenant = p_tenant and user_id = p_user and run_id = p_run;
  update runs set gate = 'tenant' where tenant = p_tenant and user_id = p_user and run_id = p_run;
  return query select 'done', g.ready_pool, g.ready_count from pass_on(p_tenant, null, null) g union all select 'done', null::text, 0;
end $$;

create or replace function give_room(p_tenant text, p_user text, p_run uuid)
returns table (outcome text, ready_pool text, ready_count int) language sql as $$
  select * from give_room(p_tenant, p_user, p_run, '{}')
$$;

-- As in 0003, with the template and a key. A key that has made a sandbox stands in `idempotency_keys` beside those of runs,
-- with the sandbox's id as run and thread: so no key stands for both. Outcomes beside those of 0003: replayed | key_reused;
-- detail is then the sandbox that the key has made before.
create function create_sandbox(
  p_tenant text, p_user text, p_sandbox uuid, p_template text, p_ttl_s double precision, p_metadata jsonb, p_snapshot uuid,
  p_own text, p_most int, p_key text, p_hash bytea)
returns table (outcome text, detail text) language plpgsql as $$
declare
  most int;
  used idempotency_keys;
  t jsonb;
  c text;
begin
  select coalesce(max_sandboxes, p_most) into most from tenants where tenant = p_tenant for update;
  if p_key is not null then  -- copies of a request wait for each other at the tenant
    select * into used from idempotency_keys x where x.tenant = p_tenant and x.user_id = p_user and x.key = p_key;
    if found then
      return query select case when used.request_hash = p_hash then 'replayed' else 'key_reused' end, used.run_id::text;
      return;
    end if;
  end if;
  if (select count(*) from sandboxes s where s.tenant = p_tenant and s.expires_at > clock_timestamp()) >= most then
    return query select 'limit', most::text;
    return;
  end if;
  if p_snapshot is not null and not exists (select 1 from snapshots s where s.tenant = p_tenant and s.user_id = p_user
      and s.snapshot_id = p_snapshot and s.expires_at > clock_timestamp()) then
    return query select 'no_snapshot', null::text;
    return;
  end if;
  select h.templates -> p_template into t from open_hosts() h where h.templates ? p_template order by h.heartbeat_at desc limit 1;
  if t is null then
    return query select case when count(*) = 0 then 'no_host' else 'no_template' end, string_agg(distinct k, ', ' order by k)
      from open_hosts() h, lateral jsonb_object_keys(h.templates) k;
    return;
  end if;
  if p_ttl_s > (t ->> 'lifetime_s')::float8 then
    return query select 'too_long', t ->> 'lifetime_s';
    return;
  end if;
  c := choose_host(p_template, (t ->> 'memory')::bigint, (t ->> 'pids')::bigint, p_own, hosts_without(p_template), true);
  if c is null then
    return query select 'full', null::text;
    return;
  end if;
  insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, begins_with, expires_at)
    values (p_tenant, p_user, p_sandbox, p_template, p_metadata, p_snapshot,
      clock_timestamp() + make_interval(secs => coalesce(p_ttl_s, least(3600, (t ->> 'lifetime_s')::float8))));
  insert into placements (tenant, user_id, run_id, host_id, template, memory, pids)
    values (p_tenant, p_user, p_sandbox, c, p_template, (t ->> 'memory')::bigint, (t ->> 'pids')::bigint);
  if p_key is not null then
    insert into idempotency_keys (tenant, user_id, key, request_hash, run_id, thread_id)
      values (p_tenant, p_user, p_key, p_hash, p_sandbox, p_sandbox);
  end if;
  return query select 'placed', null::text;
end $$;

create or replace function create_sandbox(
  p_tenant text, p_user text, p_sandbox uuid, p_template text, p_ttl_s double precision, p_metadata jsonb, p_snapshot uuid,
  p_own text, p_most int)
returns table (outcome text, detail text) language sql as $$
  select * from create_sandbox(p_tenant, p_user, p_sandbox, p_template, p_ttl_s, p_metadata, p_snapshot, p_own, p_most, null, null)
$$;

-- As in 0003, with the template.
create or replace function place_alone(p_tenant text, p_user text, p_sandbox uuid, p_generation int, p_own text, p_refused text[])
returns table (outcome text, o_host text, o_address text, o_remote text) language plpgsql as $$
declare
  p placements;
  c text;
begin
  perform 1 from sandboxes where tenant = p_tenant and user_id = p_user and sandbox_id = p_sandbox
    and generation = p_generation and expires_at > clock_timestamp() for update;
  if not found then
    return query select 'superseded', null::text, null::text, null::text;
    return;
  end if;
  select * into p from placements where tenant = p_tenant and user_id = p_user and run_id = p_sandbox for update;
  select host_id into c from open_hosts() where host_id = p.host_id and host_id <> all (p_refused);
  if c is null then
    c := choose_host(p.template, p.memory, p.pids, p_own, hosts_without(p.template) || p_refused, true);
    update placements set host_id = c, placed_at = clock_timestamp()
      where tenant = p_tenant and user_id = p_user and run_id = p_sandbox;
  end if;
  if c is null then
    return query select case when exists (select 1 from open_hosts()) then 'full' else 'no_host' end, null::text, null::text, null::text;
    return;
  end if;
  return query select 'placed', h.host_id, h.address, h.remote from hosts h where h.host_id = c;
end $$;
