-- A key that has made a sandbox stands in `idempotency_keys` beside those of runs, with the sandbox's id as run and thread: so no
-- key stands for both. Parts of an older version go on with the function of revision 0003.

-- A new sandbox, placed on a host with room but not made yet. p_ttl_s null: an hour, or the template's lifetime if that is
-- less. outcome: placed | limit | no_snapshot | no_template | too_long | full | no_host | replayed | key_reused; detail explains
-- it: the limit, the templates that there are, the longest time, the sandbox that the key has made before.
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
  if p_key is not null then
    insert into idempotency_keys (tenant, user_id, key, request_hash, run_id, thread_id)
      values (p_tenant, p_user, p_key, p_hash, p_sandbox, p_sandbox);
  end if;
  return query select 'placed', null::text;
end $$;
