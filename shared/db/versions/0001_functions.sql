-- The gates: how a run gets from its submission to an executor, and how a freed thread or slot is passed on.
-- Lock order everywhere: tenant, thread, run.

-- A run passes its last gate. Caller holds the tenant's row lock and has counted the slot.
create function make_ready(r runs) returns void language plpgsql as $$
declare
  now_v  bigint;
  share  bigint;
  start_v bigint;
begin
  select 1000000 / weight into share from tenants where tenant = r.tenant;
  insert into vclock (pool, class) values (r.pool, r.class) on conflict do nothing;
  select v into now_v from vclock where pool = r.pool and class = r.class;
  insert into flows as f (pool, class, tenant, vfinish) values (r.pool, r.class, r.tenant, now_v + share)
    on conflict (pool, class, tenant) do update set vfinish = greatest(f.vfinish, now_v) + share
    returning vfinish - share into start_v;
  update runs set gate = null, vtime = coalesce(vtime, start_v), ready_at = clock_timestamp()
    where tenant = r.tenant and user_id = r.user_id and run_id = r.run_id;
end $$;

-- Give a free thread to the run that waits longest for it, and free slots to runs that wait for them.
-- Returns how many runs became ready, per pool. Caller holds the tenant's row lock.
create function pass_on(p_tenant text, p_user text, p_thread uuid) returns table (ready_pool text, ready_count int) language plpgsql as $$
declare
  r runs;
  pools text[] := '{}';
begin
  if p_thread is not null and (select active_run is null from threads where tenant = p_tenant and user_id = p_user and thread_id = p_thread for update) then
    select * into r from runs where tenant = p_tenant and user_id = p_user and thread_id = p_thread and gate = 'thread' order by seq limit 1 for update;
    if found then
      update threads set active_run = r.run_id where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
      update runs set gate = 'tenant' where tenant = r.tenant and user_id = r.user_id and run_id = r.run_id;
    end if;
  end if;
  while (select slots < max_in_flight from tenants where tenant = p_tenant) loop
    select * into r from runs where tenant = p_tenant and gate = 'tenant' order by class, seq limit 1 for update;
    exit when not found;
    update tenants set slots = slots + 1, waiting = waiting - 1 where tenant = p_tenant;
    perform make_ready(r);
    pools := pools || r.pool;
  end loop;
  return query select p, count(*)::int from unnest(pools) p group by p;
end $$;

-- Accept a run. outcome: created | replayed | key_reused | no_thread | no_parent | parent_ended | busy | queue_full.
-- For 'created', gate null means that an executor may take it now; o_stop are runs that executors must be told to stop,
-- o_actions says how, o_woken the pools of runs that are ready, once for each run, and o_ended with o_attempts the runs that
-- ended by it and whose watchers must be told. For 'replayed' o_woken has the run's own pool if nobody has taken it yet: its
-- first submission may have got no further than the commit.
create function submit_run(
  p_tenant text, p_user text, p_run uuid, p_thread uuid, p_create_thread boolean, p_temporary boolean,
  p_assistant uuid, p_graph text, p_kind text, p_pool text, p_class smallint, p_strategy text,
  p_kwargs json, p_base_metadata jsonb, p_metadata jsonb, p_delay_s double precision, p_timeout_s double precision,
  p_key text, p_request_hash bytea, p_parent uuid, p_keep_temporary_s double precision)
returns table (outcome text, o_run uuid, o_thread uuid, o_gate text, o_created timestamptz, o_metadata jsonb, o_stop uuid[], o_actions text[], o_woken text[], o_ended uuid[], o_attempts int[]) language plpgsql as $$
declare
  te tenants;
  th threads;
  k  idempotency_keys;
  r  runs;
  pa runs;
  g  text;
  stop uuid[] := '{}';
  actions text[] := '{}';
  woken text[] := '{}';
  ended uuid[] := '{}';
  attempts int[] := '{}';
begin
  select * into te from tenants where tenant = p_tenant for update;
  if p_key is not null then
    select * into k from idempotency_keys where tenant = p_tenant and user_id = p_user and key = p_key;
    if found then
      return query select case when k.request_hash = p_request_hash then 'replayed' else 'key_reused' end,
        k.run_id, k.thread_id, null::text, k.created_at, null::jsonb, null::uuid[], null::text[],
        array(select pool from runs where tenant = p_tenant and user_id = p_user and run_id = k.run_id
              and status = 'pending' and gate is null and k.request_hash = p_request_hash),
        null::uuid[], null::int[];
      return;
    end if;
  end if;
  select * into th from threads where tenant = p_tenant and user_id = p_user and thread_id = p_thread for update;
  if not found then
    if not p_create_thread then
      return query select 'no_thread', null::uuid, null::uuid, null::text, null::timestamptz, null::jsonb, null::uuid[], null::text[], null::text[], null::uuid[], null::int[];
      return;
    end if;
    insert into threads (tenant, user_id, thread_id, temporary) values (p_tenant, p_user, p_thread, p_temporary) returning * into th;
  end if;
  if p_parent is not null then
    select * into pa from runs where tenant = p_tenant and user_id = p_user and run_id = p_parent and kind = 'run';
    if not found then
      return query select 'no_parent', null::uuid, null::uuid, null::text, null::timestamptz, null::jsonb, null::uuid[], null::text[], null::text[], null::uuid[], null::int[];
      return;
    end if;
    if pa.status not in ('pending', 'running') or pa.cancel_action is not null
        or (pa.thread_id = p_thread and p_strategy in ('interrupt', 'rollback')) then
      return query select 'parent_ended', null::uuid, null::uuid, null::text, null::timestamptz, null::jsonb, null::uuid[], null::text[], null::text[], null::uuid[], null::int[];
      return;
    end if;
  end if;
  if th.status = 'busy' and p_strategy = 'reject' then
    return query select 'busy', null::uuid, null::uuid, null::text, null::timestamptz, null::jsonb, null::uuid[], null::text[], null::text[], null::uuid[], null::int[];
    return;
  end if;
  if te.waiting >= te.max_queued then
    return query select 'queue_full', null::uuid, null::uuid, null::text, null::timestamptz, null::jsonb, null::uuid[], null::text[], null::text[], null::uuid[], null::int[];
    return;
  end if;
  if th.status = 'busy' and p_strategy in ('interrupt', 'rollback') then
    with done as materialized (
      select * from cancel_runs(p_tenant, p_user, p_strategy, p_keep_temporary_s, array(
        select run_id from runs where tenant = p_tenant and user_id = p_user and thread_id = p_thread and status in ('pending', 'running'))))
    select array(select done.o_stop from done where done.o_stop is not null order by done.o_stop),
        array(select done.o_action from done where done.o_stop is not null order by done.o_stop),
        array(select done.ready_pool from done, generate_series(1, done.ready_count) where done.ready_pool is not null),
        array(select done.o_ended from done where done.o_attempt is not null order by done.o_ended),
        array(select done.o_attempt from done where done.o_attempt is not null order by done.o_ended)
      into stop, actions, woken, ended, attempts;
    select * into te from tenants where tenant = p_tenant;
    select * into th from threads where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
  end if;
  g := case when p_delay_s > 0 then 'time' when th.active_run is not null then 'thread' when te.slots >= te.max_in_flight then 'tenant' end;
  insert into runs (tenant, user_id, run_id, thread_id, parent_run, assistant_id, graph_id, kind, pool, class, gate, not_before,
                    multitask_strategy, timeout_s, kwargs, metadata, created_at)
  values (p_tenant, p_user, p_run, p_thread, p_parent, p_assistant, p_graph, p_kind, p_pool, p_class, g,
          case when p_delay_s > 0 then clock_timestamp() + make_interval(secs => p_delay_s) end,
          p_strategy, p_timeout_s, p_kwargs, p_base_metadata || th.metadata || p_metadata,
          clock_timestamp() + make_interval(secs => greatest(p_delay_s, 0)))
  returning * into r;
  update threads set
      status = 'busy', updated_at = clock_timestamp(),
      active_run = case when g is null or g = 'tenant' then r.run_id else active_run end,
      metadata = case when p_kind = 'run' then metadata || jsonb_build_object('graph_id', p_graph, 'assistant_id', p_assistant) else metadata end
    where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
  if g is null then
    update tenants set slots = slots + 1 where tenant = p_tenant;
    perform make_ready(r);
  else
    update tenants set waiting = waiting + 1 where tenant = p_tenant;
  end if;
  if p_key is not null then
    insert into idempotency_keys (tenant, user_id, key, request_hash, run_id, thread_id) values (p_tenant, p_user, p_key, p_request_hash, p_run, p_thread);
  end if;
  return query select 'created', r.run_id, r.thread_id, g, r.created_at, r.metadata, stop, actions, woken, ended, attempts;
end $$;

-- Whether an executor holds a suspect: a run that one more death ends, and that has not written a checkpoint here.
create function holds_suspect(p_owner text, p_suspect int) returns boolean language sql stable as $$
  select exists (
    select 1 from runs r where r.status = 'running' and r.deaths > 0 and r.deaths >= p_suspect and r.lease_owner = p_owner
      and not exists (select 1 from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id
                      and c.thread_id = r.thread_id::text and c.run_id = r.run_id and c.attempt = r.attempt))
$$;

-- Give pending runs that are ready to an executor, in fair order: class, then virtual time. With p_longest it gives one
-- run, the head of the class that has waited longest, so that no class starves.
-- A run that kills its executor takes those beside it along, and all of them come near the limit together. So runs that
-- have died p_suspect times (above 0) are only given to who asks for nothing else (p_suspects), and one by one: whom the
-- next death ends, it ends alone.
-- o_resumes: an earlier attempt has written a checkpoint. o_head: the thread's newest checkpoint.
create function claim_runs(
  p_pool text, p_owner text, p_lease_s double precision, p_limit int, p_longest boolean, p_suspect int,
  p_suspects boolean)
returns table (o_run runs, o_resumes boolean, o_head text) language plpgsql as $$
declare
  low smallint := 0;
  high smallint := 2;
  n int := p_limit;
  taken runs[];
begin
  if p_longest then
    select h.class, h.class, 1 into low, high, n from generate_series(0, 2) c,
      lateral (select class, ready_at from runs where status = 'pending' and gate is null and pool = p_pool and class = c and deaths < p_suspect
        order by vtime, seq limit 1) h
      order by h.ready_at limit 1;
  end if;
  with fit as materialized (
    select tenant, user_id, run_id, class, vtime, seq from runs
      where status = 'pending' and gate is null and pool = p_pool and class between low and high and deaths < p_suspect and not p_suspects
      order by class, vtime, seq limit n for update skip locked),
  suspect as materialized (
    select tenant, user_id, run_id, class, vtime, seq from runs
      where status = 'pending' and gate is null and pool = p_pool and class between low and high
        and deaths > 0 and deaths >= p_suspect and p_suspects and not holds_suspect(p_owner, p_suspect)
      order by class, vtime, seq limit 1 for update skip locked),
  head as (
    select * from (select * from fit union all select * from suspect) h order by class, vtime, seq limit n),
  claimed as (
    update runs r set status = 'running', attempt = r.attempt + 1, lease_owner = p_owner,
        lease_expires_at = clock_timestamp() + make_interval(secs => p_lease_s),
        started_at = coalesce(r.started_at, clock_timestamp()), updated_at = clock_timestamp()
      from head h where r.tenant = h.tenant and r.user_id = h.user_id and r.run_id = h.run_id
      returning r as run)
  select array_agg(run) into taken from claimed;
  if taken is null then
    return;
  end if;
  -- A statement of its own: it must see what was committed before the claim, and the caller's statement began earlier.
  return query select r, r.attempt > 1 and exists (
        select 1 from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id and c.thread_id = r.thread_id::text
          and c.ns = '' and c.run_id = r.run_id),
      (select c.checkpoint_id from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id
        and c.thread_id = r.thread_id::text and c.ns = '' order by c.seq desc limit 1)
    from unnest(taken) r;
end $$;

-- Put a terminal state in place and close all that hangs on the run: thread, slot, journal, tool calls.
-- Caller holds the tenant's and the thread's row lock and has set the run's attempt.
create function close_run(r runs, p_status text, p_error json, p_thread_status text, p_interrupts json, p_keep_temporary_s double precision)
returns table (ready_pool text, ready_count int) language plpgsql as $$
declare
  held boolean := r.gate is null;
  others boolean;
begin
  update runs set status = p_status, gate = null, lease_owner = null, lease_expires_at = null, error = p_error,
      cancel_action = null, finished_at = clock_timestamp(), updated_at = clock_timestamp()
    where tenant = r.tenant and user_id = r.user_id and run_id = r.run_id;
  delete from placements where tenant = r.tenant and user_id = r.user_id and run_id = r.run_id;
  -- Whether these took effect nobody knows any more.
  update tool_calls set status = 'orphaned', finished_at = clock_timestamp()
    where tenant = r.tenant and user_id = r.user_id and run_id = r.run_id and status = 'started';
  if held then
    update tenants set slots = slots - 1 where tenant = r.tenant;
  else
    update tenants set waiting = waiting - 1 where tenant = r.tenant;
  end if;
  select exists (select 1 from runs where tenant = r.tenant and user_id = r.user_id and thread_id = r.thread_id and status in ('pending', 'running')) into others;
  update threads set
      active_run = case when active_run = r.run_id then null else active_run end,
      status = case when others then 'busy' when p_thread_status is not null then p_thread_status when interrupts::text <> '{}' then 'interrupted' else 'idle' end,
      interrupts = coalesce(p_interrupts, interrupts),
      error = case when p_thread_status is null then error else p_error end,
      expires_at = case when temporary and not others then clock_timestamp() + make_interval(secs => p_keep_temporary_s) end,
      updated_at = clock_timestamp(),
      state_updated_at = case when p_thread_status is null then state_updated_at else clock_timestamp() end
    where tenant = r.tenant and user_id = r.user_id and thread_id = r.thread_id;
  return query select * from pass_on(r.tenant, r.user_id, r.thread_id);
end $$;

-- The terminal transaction of the executor that owns the run. outcome: done | mine | superseded ('mine': this attempt had
-- ended it before, the reply was lost). p_events is [[seq, event, data]…]; the last one is 'end'.
create function finish_run(
  p_tenant text, p_user text, p_run uuid, p_attempt int, p_status text, p_error json, p_output json, p_partial json,
  p_thread_status text, p_interrupts json, p_events json, p_keep_temporary_s double precision,
  p_prepared_at timestamptz, p_first_model_request_at timestamptz, p_first_output_at timestamptz)
returns table (outcome text, ready_pool text, ready_count int) language plpgsql as $$
declare
  r runs;
begin
  select * into r from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
  if not found then
    return query select 'superseded', null::text, 0;
    return;
  end if;
  perform 1 from tenants where tenant = p_tenant for update;
  perform 1 from threads where tenant = p_tenant and user_id = p_user and thread_id = r.thread_id for update;
  update runs set output = p_output, partial = p_partial,
      prepared_at = coalesce(prepared_at, p_prepared_at),
      first_model_request_at = coalesce(first_model_request_at, p_first_model_request_at),
      first_output_at = coalesce(first_output_at, p_first_output_at)
    where tenant = p_tenant and user_id = p_user and run_id = p_run and attempt = p_attempt and status = 'running'
    returning * into r;
  if not found then
    select * into r from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
    return query select case when r.attempt = p_attempt and r.status not in ('pending', 'running') then 'mine' else 'superseded' end, null::text, 0;
    return;
  end if;
  insert into journal (tenant, user_id, run_id, attempt, seq, event, data)
    select p_tenant, p_user, p_run, p_attempt, (e->>0)::int, e->>1, e->>2 from json_array_elements(p_events) e;
  return query select 'done', c.ready_pool, c.ready_count from close_run(r, p_status, p_error, p_thread_status, p_interrupts, p_keep_temporary_s) c
    union all select 'done', null::text, 0;
end $$;

-- End a run from outside: takes the next attempt, so that a graph that still works on it is superseded. With p_attempt only
-- if that attempt holds the run. outcome: done | terminal | missing ('terminal': ended, or held by another attempt).
-- p_error null means that it was cancelled.
create function end_run(
  p_tenant text, p_user text, p_run uuid, p_status text, p_error json, p_keep_temporary_s double precision, p_attempt int default null)
returns table (outcome text, o_attempt int, ready_pool text, ready_count int) language plpgsql as $$
declare
  r runs;
  t uuid;
begin
  select thread_id into t from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
  if not found then
    return query select 'missing', 0, null::text, 0;
    return;
  end if;
  perform 1 from tenants where tenant = p_tenant for update;
  perform 1 from threads where tenant = p_tenant and user_id = p_user and thread_id = t for update;
  update runs set attempt = attempt + 1
    where tenant = p_tenant and user_id = p_user and run_id = p_run and status in ('pending', 'running')
      and (p_attempt is null or (attempt = p_attempt and status = 'running')) returning * into r;
  if not found then
    return query select 'terminal', 0, null::text, 0;
    return;
  end if;
  if p_error is not null then
    insert into journal (tenant, user_id, run_id, attempt, seq, event, data) values (p_tenant, p_user, p_run, r.attempt, 0, 'error', p_error::text);
  end if;
  insert into journal (tenant, user_id, run_id, attempt, seq, event, data)
    values (p_tenant, p_user, p_run, r.attempt, case when p_error is null then 0 else 1 end, 'end', 'null');
  return query
    select 'done', r.attempt, c.ready_pool, c.ready_count
      from close_run(r, p_status, p_error, case when p_error is not null then 'error' when r.started_at is not null then 'interrupted' end, null, p_keep_temporary_s) c
    union all select 'done', r.attempt, null::text, 0;
end $$;

-- Cancel runs with all their descendants: those that wait end here, those that run are marked for their executors.
-- Descendants are interrupted whatever the action. Returns per marked run o_stop and o_action, per ended one o_ended with
-- the attempt of its end unless it is erased, and how many runs became ready per pool. Locks the tenant, then all threads, then all runs.
create function cancel_runs(p_tenant text, p_user text, p_action text, p_keep_temporary_s double precision, p_runs uuid[])
returns table (o_stop uuid, o_action text, o_ended uuid, ready_pool text, ready_count int, o_attempt int) language plpgsql as $$
declare
  tree uuid[];
  r runs;
  what text;
begin
  perform 1 from tenants where tenant = p_tenant for update;
  with recursive family as (
    select run_id from runs where tenant = p_tenant and user_id = p_user and run_id = any(p_runs)
    union
    select c.run_id from runs c join family f on c.parent_run = f.run_id where c.tenant = p_tenant and c.user_id = p_user)
  select array_agg(run_id) into tree from runs join family using (run_id)
    where tenant = p_tenant and user_id = p_user and status in ('pending', 'running');
  if tree is null then
    return;
  end if;
  perform 1 from (select 1 from threads where tenant = p_tenant and user_id = p_user and thread_id in (
    select thread_id from runs where tenant = p_tenant and user_id = p_user and run_id = any(tree)) order by thread_id for update) locked;
  perform 1 from (select 1 from runs where tenant = p_tenant and user_id = p_user and run_id = any(tree) order by run_id for update) locked;
  -- Those that hold a thread or a slot come last, so that neither is passed on to one of the others.
  for r in select * from runs where tenant = p_tenant and user_id = p_user and run_id = any(tree) and status in ('pending', 'running')
      order by case when gate is null then 2 when gate = 'tenant' then 1 else 0 end, seq desc loop
    what := case when r.run_id = any(p_runs) then p_action else coalesce(r.cancel_action, 'interrupt') end;
    if r.status = 'running' then
      update runs set cancel_action = what where tenant = p_tenant and user_id = p_user and run_id = r.run_id;
      return query select r.run_id, what, null::uuid, null::text, 0, null::int;
    else
      return query select null::uuid, null::text, case when e.ready_pool is null then r.run_id end, e.ready_pool, e.ready_count,
          case when e.ready_pool is null and what <> 'rollback' then e.o_attempt end
        from end_run(p_tenant, p_user, r.run_id, 'interrupted', null, p_keep_temporary_s) e;
      if what = 'rollback' then
        perform erase_run(p_tenant, p_user, r.run_id);
        -- It may have begun before: what is undone has interrupted nothing.
        update threads set status = case when interrupts::text <> '{}' then 'interrupted' else 'idle' end
          where tenant = p_tenant and user_id = p_user and thread_id = r.thread_id and status = 'interrupted';
      end if;
    end if;
  end loop;
end $$;

-- Undo a run: its checkpoints and states vanish with it, as if it had never been. The run must be terminal.
create function erase_run(p_tenant text, p_user text, p_run uuid) returns void language plpgsql as $$
declare
  t uuid;
begin
  select thread_id into t from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
  delete from checkpoint_writes w using checkpoints c
    where c.tenant = p_tenant and c.user_id = p_user and c.thread_id = t::text and c.run_id = p_run
      and w.tenant = c.tenant and w.user_id = c.user_id and w.thread_id = c.thread_id and w.ns = c.ns and w.checkpoint_id = c.checkpoint_id;
  delete from checkpoints where tenant = p_tenant and user_id = p_user and thread_id = t::text and run_id = p_run;
  -- A run that is running may be about to name a value that its parent checkpoint held.
  if not exists (select 1 from runs where tenant = p_tenant and user_id = p_user and thread_id = t and status = 'running') then
    delete from checkpoint_blobs b where b.tenant = p_tenant and b.user_id = p_user and b.thread_id = t::text and not exists (
      select 1 from checkpoints c, json_each_text(c.blobs) named
      where c.tenant = b.tenant and c.user_id = b.user_id and c.thread_id = b.thread_id and c.ns = b.ns
        and named.key = b.channel and named.value = b.version);
  end if;
  delete from state_snapshots where tenant = p_tenant and user_id = p_user and thread_id = t::text and run_id = p_run;
  delete from journal where tenant = p_tenant and user_id = p_user and run_id = p_run;
  delete from tool_calls where tenant = p_tenant and user_id = p_user and run_id = p_run;
  update snapshots set expires_at = '-infinity' where tenant = p_tenant and user_id = p_user and run_id = p_run;
  delete from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
end $$;

-- Remove a thread and all that is its own. Its runs must be terminal.
create function erase_thread(p_tenant text, p_user text, p_thread uuid) returns void language plpgsql as $$
declare
  t text := p_thread::text;
begin
  delete from journal j using runs r
    where r.tenant = p_tenant and r.user_id = p_user and r.thread_id = p_thread
      and j.tenant = r.tenant and j.user_id = r.user_id and j.run_id = r.run_id;
  delete from tool_calls c using runs r
    where r.tenant = p_tenant and r.user_id = p_user and r.thread_id = p_thread
      and c.tenant = r.tenant and c.user_id = r.user_id and c.run_id = r.run_id;
  update snapshots set expires_at = '-infinity' where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
  delete from runs where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
  delete from checkpoint_writes where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from checkpoint_blobs where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from checkpoints where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from state_blobs where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from state_snapshots where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from threads where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
end $$;
