-- A run that goes on from another one's checkpoint writes there: answers to interrupts, what its tasks came to, the state as
-- it left it. To undo it, each such row says which run wrote it last, and what it replaced is kept beside.

alter table checkpoint_writes add column run_id uuid;          -- null: written before this column was there

create table replaced_writes (
  tenant text, user_id text, thread_id text, by_run uuid, ns text, checkpoint_id text, task_id text, slot smallint,
  run_id uuid not null,                                       -- whose it was
  path   text not null,
  type   text not null,
  body   bytea not null,
  primary key (tenant, user_id, thread_id, by_run, ns, checkpoint_id, task_id, slot)
);

create table replaced_states (
  tenant text, user_id text, thread_id text, by_run uuid, ns text, checkpoint_id text,
  run_id    uuid not null,
  seq       bigint not null,
  parent_id text,
  "values"  json not null,
  refs      json not null,
  next      json not null,
  tasks     json not null,
  parent_results json not null,
  metadata  json not null,
  created_at text not null,
  primary key (tenant, user_id, thread_id, by_run, ns, checkpoint_id)
);

-- The run that holds a thread. The id may be any text: a graph may write to threads of its own.
create function holder_of(p_tenant text, p_user text, p_thread text) returns uuid language sql stable as $$
  select active_run from threads where tenant = p_tenant and user_id = p_user
    and thread_id = case when p_thread ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then p_thread::uuid end
$$;

-- Executors of earlier versions name no run. Theirs is the one that holds the thread: another one's writes are refused.
create function name_writer() returns trigger language plpgsql as $$
begin
  new.run_id := holder_of(new.tenant, new.user_id, new.thread_id);
  return new;
end $$;

create function keep_replaced() returns trigger language plpgsql as $$
declare
  w uuid := old.run_id;
begin
  if new.run_id is not distinct from old.run_id then          -- not named, or the same
    new.run_id := coalesce(holder_of(new.tenant, new.user_id, new.thread_id), new.run_id);
  end if;
  if new.run_id is null or new.run_id = w then
    return new;
  end if;
  if w is null then
    select c.run_id into w from checkpoints c where c.tenant = old.tenant and c.user_id = old.user_id
      and c.thread_id = old.thread_id and c.ns = old.ns and c.checkpoint_id = old.checkpoint_id;
    w := coalesce(w, '00000000-0000-0000-0000-000000000000');
  end if;
  if tg_table_name = 'checkpoint_writes' then
    insert into replaced_writes (tenant, user_id, thread_id, by_run, ns, checkpoint_id, task_id, slot, run_id, path, type, body)
      values (old.tenant, old.user_id, old.thread_id, new.run_id, old.ns, old.checkpoint_id, old.task_id, old.slot, w, old.path,
        old.type, old.body) on conflict do nothing;
  else
    insert into replaced_states (tenant, user_id, thread_id, by_run, ns, checkpoint_id, run_id, seq, parent_id, "values", refs,
        next, tasks, parent_results, metadata, created_at)
      values (old.tenant, old.user_id, old.thread_id, new.run_id, old.ns, old.checkpoint_id, w, old.seq, old.parent_id,
        old."values", old.refs, old.next, old.tasks, old.parent_results, old.metadata, old.created_at) on conflict do nothing;
  end if;
  return new;
end $$;

create trigger name_writer before insert on checkpoint_writes for each row when (new.run_id is null)
  execute function name_writer();
create trigger keep_replaced before update on checkpoint_writes for each row execute function keep_replaced();
create trigger keep_replaced before update on state_snapshots for each row execute function keep_replaced();

-- What a thread's status is by itself: that of its last run's error, or of its newest state.
create function settled_status(p_tenant text, p_user text, p_thread uuid) returns text language sql stable as $$
  select case when t.error is not null then 'error' when (
      select s.next::text from state_snapshots s where s.tenant = t.tenant and s.user_id = t.user_id
        and s.thread_id = t.thread_id::text and s.ns = '' order by s.seq desc limit 1) <> '[]' then 'interrupted' else 'idle' end
    from threads t where t.tenant = p_tenant and t.user_id = p_user and t.thread_id = p_thread
$$;

-- Put the thread's status right after a run of it was undone, and drop blobs that no state names. Nothing while another run
-- is active: its end will do it, and its writes may name a blob again.
create function settle_thread(p_tenant text, p_user text, p_thread uuid) returns void language plpgsql as $$
declare
  t text := p_thread::text;
begin
  if exists (select 1 from runs where tenant = p_tenant and user_id = p_user and thread_id = p_thread
      and status in ('pending', 'running')) then
    return;
  end if;
  update threads set status = settled_status(p_tenant, p_user, p_thread),
      updated_at = clock_timestamp(), state_updated_at = clock_timestamp()
    where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
  delete from state_blobs b where b.tenant = p_tenant and b.user_id = p_user and b.thread_id = t
    and not exists (select 1 from state_snapshots s, json_each_text(s.refs) named where s.tenant = b.tenant
      and s.user_id = b.user_id and s.thread_id = b.thread_id and named.value = encode(b.hash, 'hex'))
    and not exists (select 1 from replaced_states s, json_each_text(s.refs) named where s.tenant = b.tenant
      and s.user_id = b.user_id and s.thread_id = b.thread_id and named.value = encode(b.hash, 'hex'));
end $$;

create or replace function close_run(r runs, p_status text, p_error json, p_thread_status text, p_interrupts json, p_keep_temporary_s double precision)
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
      status = case when others then 'busy' else coalesce(p_thread_status, settled_status(r.tenant, r.user_id, r.thread_id)) end,
      interrupts = coalesce(p_interrupts, interrupts),
      error = case when p_thread_status is null then error else p_error end,
      expires_at = case when temporary and not others then clock_timestamp() + make_interval(secs => p_keep_temporary_s) end,
      updated_at = clock_timestamp(),
      state_updated_at = case when p_thread_status is null then state_updated_at else clock_timestamp() end
    where tenant = r.tenant and user_id = r.user_id and thread_id = r.thread_id;
  return query select * from pass_on(r.tenant, r.user_id, r.thread_id);
end $$;

create or replace function end_run(
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
      from close_run(r, p_status, p_error, case when r.kind <> 'run' or r.cancel_action = 'rollback' then null
        when p_error is not null then 'error' when r.started_at is not null then 'interrupted' end, null, p_keep_temporary_s) c
    union all select 'done', r.attempt, null::text, 0;
end $$;

create or replace function cancel_runs(p_tenant text, p_user text, p_action text, p_keep_temporary_s double precision, p_runs uuid[])
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
      if what = 'rollback' then
        update runs set cancel_action = what where tenant = p_tenant and user_id = p_user and run_id = r.run_id;
      end if;
      return query select null::uuid, null::text, case when e.ready_pool is null then r.run_id end, e.ready_pool, e.ready_count,
          case when e.ready_pool is null and what <> 'rollback' then e.o_attempt end
        from end_run(p_tenant, p_user, r.run_id, 'interrupted', null, p_keep_temporary_s) e;
      if what = 'rollback' then
        perform erase_run(p_tenant, p_user, r.run_id);
      end if;
    end if;
  end loop;
end $$;


-- See erase_run. What is at one of the run's own checkpoints goes with it, whoever wrote it.
create function erase_writes(p_tenant text, p_user text, p_thread text, p_run uuid) returns void language plpgsql as $$
begin
  delete from checkpoint_writes w where w.tenant = p_tenant and w.user_id = p_user and w.thread_id = p_thread
    and (w.run_id = p_run or exists (
      select 1 from checkpoints c where c.tenant = w.tenant and c.user_id = w.user_id and c.thread_id = w.thread_id
        and c.ns = w.ns and c.checkpoint_id = w.checkpoint_id and c.run_id = p_run));
  delete from replaced_writes k using checkpoints c where k.tenant = p_tenant and k.user_id = p_user and k.thread_id = p_thread
    and c.tenant = k.tenant and c.user_id = k.user_id and c.thread_id = k.thread_id
    and c.ns = k.ns and c.checkpoint_id = k.checkpoint_id and c.run_id = p_run;
  -- What a later run has replaced was this one's: from now on it is what this one had replaced.
  update replaced_writes later set run_id = k.run_id, path = k.path, type = k.type, body = k.body
    from replaced_writes k
    where k.tenant = p_tenant and k.user_id = p_user and k.thread_id = p_thread and k.by_run = p_run
      and later.tenant = k.tenant and later.user_id = k.user_id and later.thread_id = k.thread_id and later.run_id = p_run
      and later.ns = k.ns and later.checkpoint_id = k.checkpoint_id and later.task_id = k.task_id and later.slot = k.slot;
  delete from replaced_writes where tenant = p_tenant and user_id = p_user and thread_id = p_thread and run_id = p_run;
  insert into checkpoint_writes (tenant, user_id, thread_id, ns, checkpoint_id, task_id, slot, run_id,
      path, type, body)
    select tenant, user_id, thread_id, ns, checkpoint_id, task_id, slot, run_id, path, type, body
    from replaced_writes where tenant = p_tenant and user_id = p_user and thread_id = p_thread and by_run = p_run
    on conflict do nothing;
  delete from replaced_writes where tenant = p_tenant and user_id = p_user and thread_id = p_thread and by_run = p_run;
end $$;

-- See erase_run. What is at one of the run's own checkpoints goes with it, whoever wrote it.
create function erase_states(p_tenant text, p_user text, p_thread text, p_run uuid) returns void language plpgsql as $$
begin
  delete from state_snapshots w where w.tenant = p_tenant and w.user_id = p_user and w.thread_id = p_thread
    and (w.run_id = p_run or exists (
      select 1 from checkpoints c where c.tenant = w.tenant and c.user_id = w.user_id and c.thread_id = w.thread_id
        and c.ns = w.ns and c.checkpoint_id = w.checkpoint_id and c.run_id = p_run));
  delete from replaced_states k using checkpoints c where k.tenant = p_tenant and k.user_id = p_user and k.thread_id = p_thread
    and c.tenant = k.tenant and c.user_id = k.user_id and c.thread_id = k.thread_id
    and c.ns = k.ns and c.checkpoint_id = k.checkpoint_id and c.run_id = p_run;
  -- What a later run has replaced was this one's: from now on it is what this one had replaced.
  update replaced_states later set run_id = k.run_id, seq = k.seq, parent_id = k.parent_id, "values" = k."values", refs = k.refs, next = k.next, tasks = k.tasks, parent_results = k.parent_results, metadata = k.metadata, created_at = k.created_at
    from replaced_states k
    where k.tenant = p_tenant and k.user_id = p_user and k.thread_id = p_thread and k.by_run = p_run
      and later.tenant = k.tenant and later.user_id = k.user_id and later.thread_id = k.thread_id and later.run_id = p_run
      and later.ns = k.ns and later.checkpoint_id = k.checkpoint_id;
  delete from replaced_states where tenant = p_tenant and user_id = p_user and thread_id = p_thread and run_id = p_run;
  insert into state_snapshots (tenant, user_id, thread_id, ns, checkpoint_id, run_id,
      seq, parent_id, "values", refs, next, tasks, parent_results, metadata, created_at) overriding system value
    select tenant, user_id, thread_id, ns, checkpoint_id, run_id, seq, parent_id, "values", refs, next, tasks, parent_results, metadata, created_at
    from replaced_states where tenant = p_tenant and user_id = p_user and thread_id = p_thread and by_run = p_run
    on conflict do nothing;
  delete from replaced_states where tenant = p_tenant and user_id = p_user and thread_id = p_thread and by_run = p_run;
end $$;

-- Undo a run: what it wrote vanishes with it, and what it replaced is there again, as if it had never been. What a later run
-- has replaced stays, and goes back further when that one is undone. The run must be terminal.
create or replace function erase_run(p_tenant text, p_user text, p_run uuid) returns void language plpgsql as $$
declare
  t uuid;
  e json;
begin
  select thread_id, error into t, e from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
  if not found then
    return;
  end if;
  perform erase_writes(p_tenant, p_user, t::text, p_run);
  perform erase_states(p_tenant, p_user, t::text, p_run);
  delete from checkpoints where tenant = p_tenant and user_id = p_user and thread_id = t::text and run_id = p_run;
  -- A run that is running may be about to name a value that its parent checkpoint held.
  if not exists (select 1 from runs where tenant = p_tenant and user_id = p_user and thread_id = t and status = 'running') then
    delete from checkpoint_blobs b where b.tenant = p_tenant and b.user_id = p_user and b.thread_id = t::text and not exists (
      select 1 from checkpoints c, json_each_text(c.blobs) named
      where c.tenant = b.tenant and c.user_id = b.user_id and c.thread_id = b.thread_id and c.ns = b.ns
        and named.key = b.channel and named.value = b.version);
  end if;
  delete from journal where tenant = p_tenant and user_id = p_user and run_id = p_run;
  delete from tool_calls where tenant = p_tenant and user_id = p_user and run_id = p_run;
  update snapshots set expires_at = '-infinity' where tenant = p_tenant and user_id = p_user and run_id = p_run;
  delete from runs where tenant = p_tenant and user_id = p_user and run_id = p_run;
  if e is not null then
    -- The thread's, if it is the last one's: then that of the run before.
    update threads set error = (
        select r.error from runs r where r.tenant = p_tenant and r.user_id = p_user and r.thread_id = t and r.kind = 'run'
          and r.started_at is not null and r.finished_at is not null order by r.finished_at desc limit 1)
      where tenant = p_tenant and user_id = p_user and thread_id = t and error::text = e::text;
  end if;
  perform settle_thread(p_tenant, p_user, t);
end $$;

create or replace function erase_thread(p_tenant text, p_user text, p_thread uuid) returns void language plpgsql as $$
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
  delete from replaced_writes where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from replaced_states where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from checkpoint_blobs where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from checkpoints where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from state_blobs where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from state_snapshots where tenant = p_tenant and user_id = p_user and thread_id = t;
  delete from threads where tenant = p_tenant and user_id = p_user and thread_id = p_thread;
end $$;
