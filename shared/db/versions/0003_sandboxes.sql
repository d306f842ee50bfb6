-- Sandboxes without a run. `placements` says where one is, by its own id: so the choice of a host counts all sandboxes alike.
-- Lock order: tenant, sandbox, placement, decision.

-- Sandboxes without a run that a tenant may have at once; null: as SANDFLEET_TENANT_MAX_SANDBOXES says. Before hosts: what goes on
-- meanwhile takes a tenant first, then looks at hosts.
alter table tenants add column max_sandboxes int check (max_sandboxes >= 0);

create table sandboxes (
  tenant text, user_id text, sandbox_id uuid,
  template    text not null,
  metadata    jsonb not null,
  generation  int not null default 1,                        -- the fencing token: each loss and each restore begins another
  begins_with uuid,                                          -- the snapshot that its files begin with …
  begun_at    timestamptz not null default clock_timestamp(),   -- … unless it has left one itself since then
  restored    uuid,                                          -- the snapshot that this generation did begin with
  lost        text,                                          -- why the generation before this one ended
  told        boolean not null default true,                 -- whether a caller has heard of that
  created_at  timestamptz not null default clock_timestamp(),
  expires_at  timestamptz not null,
  primary key (tenant, user_id, sandbox_id)
) with (fillfactor = 70);
create index sandboxes_recent on sandboxes (tenant, user_id, created_at desc, sandbox_id);
create index sandboxes_metadata on sandboxes using gin (metadata jsonb_path_ops);
create index sandboxes_expiring on sandboxes (expires_at);

-- What a host makes sandboxes of: {template: {memory, pids, lifetime_s}}. null: it knows only sandboxes of runs.
alter table hosts add column templates jsonb;

-- Hosts that cannot make sandboxes of a template.
create function hosts_without(p_template text) returns text[] language sql stable as $$
  select coalesce(array_agg(host_id), '{}') from hosts where not coalesce(templates ? p_template, false)
$$;

-- A new sandbox, placed on a host with room but not made yet. p_ttl_s null: an hour, or the template's lifetime if that is
-- less. outcome: placed | limit | no_snapshot | no_template | too_long | full | no_host; detail explains it: the limit, the
-- templates that there are, the longest time.
create function create_sandbox(
  p_tenant text, p_user text, p_sandbox uuid, p_template text, p_ttl_s double precision, p_metadata jsonb, p_snapshot uuid,
  p_own text, p_most int)
returns table (outcome text, detail text) language plpgsql as $$
declare
  most int;
  t jsonb;
  c text;
begin
  select coalesce(max_sandboxes, p_most) into most from tenants where tenant = p_tenant for update;
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
  c := choose_host((t ->> 'memory')::bigint, (t ->> 'pids')::bigint, p_own, hosts_without(p_template), true);
  if c is null then
    return query select 'full', null::text;
    return;
  end if;
  insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, begins_with, expires_at)
    values (p_tenant, p_user, p_sandbox, p_template, p_metadata, p_snapshot,
      clock_timestamp() + make_interval(secs => coalesce(p_ttl_s, least(3600, (t ->> 'lifetime_s')::float8))));
  insert into placements (tenant, user_id, run_id, host_id, template, memory, pids)
    values (p_tenant, p_user, p_sandbox, c, p_template, (t ->> 'memory')::bigint, (t ->> 'pids')::bigint);
  return query select 'placed', null::text;
end $$;

-- The host where this generation of a sandbox is to be made: the one that was chosen, unless it is gone or among those that
-- refused it. outcome: placed | full | no_host | superseded.
create function place_alone(p_tenant text, p_user text, p_sandbox uuid, p_generation int, p_own text, p_refused text[])
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
    c := choose_host(p.memory, p.pids, p_own, hosts_without(p.template) || p_refused, true);
    update placements set host_id = c, placed_at = clock_timestamp()
      where tenant = p_tenant and user_id = p_user and run_id = p_sandbox;
  end if;
  if c is null then
    return query select case when exists (select 1 from open_hosts()) then 'full' else 'no_host' end, null::text, null::text, null::text;
    return;
  end if;
  return query select 'placed', h.host_id, h.address, h.remote from hosts h where h.host_id = c;
end $$;
