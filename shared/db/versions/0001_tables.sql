-- Keys begin with (tenant, user_id) wherever a thing belongs to a caller.
-- Bodies are `json` or text, not `jsonb`: U+0000 must survive. Only what is searched by containment is jsonb.

create table tenants (
  tenant        text primary key,
  weight        int not null default 1 check (weight > 0),   -- share of the fleet beside other tenants
  max_in_flight int not null check (max_in_flight > 0),      -- runs that may be ready or running
  max_queued    int not null check (max_queued > 0),         -- runs that may wait at a gate
  slots         int not null default 0 check (slots >= 0),   -- runs that are ready or running now
  waiting       int not null default 0 check (waiting >= 0)  -- runs that wait at a gate now
) with (fillfactor = 50);

create table api_keys (
  key_hash   bytea primary key,                              -- SHA-256 of the key; the key itself is never stored
  tenant     text not null references tenants,
  user_id    text not null,
  name       text not null,
  created_at timestamptz not null default clock_timestamp(),
  revoked_at timestamptz
);

-- Work that a deployment does once in a while: when it is somebody's turn again.
create table turns (name text primary key, due_at timestamptz not null default '-infinity') with (fillfactor = 20);
insert into turns (name) values ('sweep'), ('top_up'), ('suspects'), ('snapshots');

-- Start-time fair queueing: one virtual clock per (pool, class), one finish per tenant in it.
create table vclock (
  pool text, class smallint, v bigint not null default 0,
  primary key (pool, class)
) with (fillfactor = 20);

create table flows (
  pool text, class smallint, tenant text, vfinish bigint not null,
  primary key (pool, class, tenant)
) with (fillfactor = 50);

create table graphs (
  graph_id      text primary key,
  pool          text not null,
  schemas       json not null,                               -- the SDK's GraphSchema without graph_id
  drawings      json not null,                               -- {"0": {nodes, edges}, "1": …} by xray depth
  registered_at timestamptz not null default clock_timestamp()
);

create table executors (
  executor_id  text primary key,
  pool         text not null,
  slots        int not null,
  busy         int not null,                                -- slots taken, also by graphs that do not end when told to
  loop_lag_ms  int not null default 0,                      -- longest that the graphs' event loop was held, since the last beat
  started_at   timestamptz not null default clock_timestamp(),
  heartbeat_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

create table hosts (
  host_id       text primary key,
  instance      text not null,
  address       text not null,                              -- unix:PATH, for executors of its machine
  remote        text,                                       -- http://HOST:PORT, for all others; null: there is no way from elsewhere
  backend       text not null,
  room          int not null,                               -- sandboxes of the default template that fit beside those that are there
  sandboxes     int not null,                               -- those that are there, warm ones not counted
  memory        bigint not null,                            -- sums of the limits that its sandboxes may have …
  pids          bigint not null,
  most          int not null,                               -- … and how many they may be
  memory_taken  bigint not null,
  pids_taken    bigint not null,
  draining      boolean not null,                           -- it takes no new ones
  registered_at timestamptz not null default clock_timestamp(),
  heartbeat_at  timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Which host has, or is to make, the sandbox of a live run. Without a host the run waits for room.
create table placements (
  tenant text, user_id text, run_id uuid,
  host_id    text,
  template   text not null,
  memory     bigint not null,                               -- the template's limits
  pids       bigint not null,
  sandbox_id text,                                          -- the one that the run knows of; another one means that this is lost
  placed_at  timestamptz not null default clock_timestamp(),   -- without a host: since when it waits
  primary key (tenant, user_id, run_id)
) with (fillfactor = 70);
create index placements_of_host on placements (host_id);
create index placements_waiting on placements (placed_at) where host_id is null;

-- What a deployment makes belongs to everybody: tenant '' and user ''.
create table assistants (
  tenant text, user_id text, assistant_id uuid,
  graph_id    text not null,
  name        text not null,
  description text,
  config      json not null default '{}',
  context     json not null default '{}',
  metadata    jsonb not null default '{}',
  version     int not null default 1,
  created_at  timestamptz not null default clock_timestamp(),
  updated_at  timestamptz not null default clock_timestamp(),
  primary key (tenant, user_id, assistant_id)
);

create table assistant_versions (
  tenant text, user_id text, assistant_id uuid, version int,
  graph_id    text not null,
  name        text not null,
  description text,
  config      json not null,
  context     json not null,
  metadata    jsonb not null,
  created_at  timestamptz not null default clock_timestamp(),
  primary key (tenant, user_id, assistant_id, version)
);

create table threads (
  tenant text, user_id text, thread_id uuid,
  metadata         jsonb not null default '{}',
  config           json not null default '{}',
  status           text not null default 'idle' check (status in ('idle', 'busy', 'interrupted', 'error')),
  interrupts       json not null default '{}',               -- {task_id: [{id, value}]}
  error            json,                                     -- {error, message}
  active_run       uuid,                                     -- the run that holds the thread
  temporary        boolean not null default false,           -- made for a stateless run
  expires_at       timestamptz,                              -- a temporary thread is removed after this
  created_at       timestamptz not null default clock_timestamp(),
  updated_at       timestamptz not null default clock_timestamp(),
  state_updated_at timestamptz not null default clock_timestamp(),
  primary key (tenant, user_id, thread_id)
) with (fillfactor = 70);
create index threads_recent on threads (tenant, user_id, created_at desc, thread_id);
create index threads_metadata on threads using gin (metadata jsonb_path_ops);
create index threads_expired on threads (expires_at) where expires_at is not null;

create table runs (
  tenant text, user_id text, run_id uuid,
  seq                 bigint generated always as identity,   -- order of creation
  thread_id           uuid not null,
  parent_run          uuid,                                  -- of the same owner; its cancellation is this run's too
  assistant_id        uuid not null,
  graph_id            text not null,
  kind                text not null check (kind in ('run', 'update_state')),
  pool                text not null,
  class               smallint not null,                     -- 0 interactive, 1 standard, 2 batch
  status              text not null default 'pending'
                      check (status in ('pending', 'running', 'success', 'error', 'timeout', 'interrupted')),
  gate                text check (gate in ('time', 'thread', 'tenant', 'children', 'room')),  -- what a pending run waits for; null: an executor
  not_before          timestamptz,
  vtime               bigint,
  ready_at            timestamptz,
  attempt             int not null default 0,                -- the fencing token
  deaths              int not null default 0,                -- executor deaths in a row without a new checkpoint
  lease_owner         text,
  lease_expires_at    timestamptz,
  multitask_strategy  text not null,
  timeout_s           double precision not null,
  kwargs              json not null,
  metadata            jsonb not null,
  cancel_action       text check (cancel_action in ('interrupt', 'rollback')),
  output              json,                                  -- {checkpoint_id, interrupts} or an operation's result
  error               json,                                  -- {error, message}
  partial             json,                                  -- text that a model had written when the run broke off
  created_at          timestamptz not null default clock_timestamp(),
  updated_at          timestamptz not null default clock_timestamp(),
  started_at          timestamptz,
  prepared_at         timestamptz,
  first_model_request_at timestamptz,
  first_output_at     timestamptz,
  finished_at         timestamptz,
  journal_expired     boolean not null default false,        -- of its journal only the end is left
  primary key (tenant, user_id, run_id)
) with (fillfactor = 70);
create index runs_of_thread on runs (tenant, user_id, thread_id, seq desc);
create index runs_of_parent on runs (tenant, user_id, parent_run) where parent_run is not null;
create index runs_ready on runs (pool, class, vtime, seq) where status = 'pending' and gate is null;
create index runs_waiting_tenant on runs (tenant, class, seq) where gate = 'tenant';
create index runs_waiting_thread on runs (tenant, user_id, thread_id, seq) where gate = 'thread';
create index runs_waiting_time on runs (not_before) where gate = 'time';
create index runs_waiting_room on runs (tenant, user_id, run_id) where gate = 'room';
create index runs_waiting_children on runs (tenant, user_id, run_id) where gate = 'children';
create index runs_finished on runs (finished_at) where finished_at is not null and not journal_expired;
create index runs_given_back on runs (started_at) where status = 'pending' and started_at is not null;
create index runs_operations_ended on runs (finished_at) where kind <> 'run' and finished_at is not null;
create index runs_died on runs (pool, class, vtime, seq) where status = 'pending' and gate is null and deaths > 0;
create index runs_died_leased on runs (lease_owner) where status = 'running' and deaths > 0;
create index runs_leased on runs (lease_expires_at) where status = 'running';

-- When the last sweep looked, and since when sweeps have come without a pause: whether the database was away.
create table pulse (
  one          boolean primary key default true check (one),
  beat_at      timestamptz not null,
  steady_since timestamptz not null
) with (fillfactor = 50);

create table idempotency_keys (
  tenant text, user_id text, key text,
  request_hash bytea not null,
  run_id       uuid not null,
  thread_id    uuid not null,
  created_at   timestamptz not null default clock_timestamp(),
  primary key (tenant, user_id, key)
);
create index idempotency_keys_age on idempotency_keys (created_at);

create table journal (
  tenant text, user_id text, run_id uuid, attempt int, seq int,
  event text not null,
  data  text not null,                                       -- JSON
  primary key (tenant, user_id, run_id, attempt, seq)
);

-- The ledger of side effects: what a run has called, so that a replay from a checkpoint calls nothing twice.
create table tool_calls (
  tenant text, user_id text, run_id uuid,
  call_id      uuid,                                         -- the same in each replay; made of ns, message, id and place
  execution    smallint,                                     -- executions of this call before this one: a graph may retry
  ns           text not null,                                -- the task that makes the call: node:task|node:task
  message_id   text,                                         -- the AI message that asks for it; null: the graph itself does
  tool_call_id text,                                         -- the model's id, which it may repeat
  name         text not null,
  attempt      int not null,                                 -- of the run, that started it last
  status       text not null check (status in ('started', 'finished', 'failed', 'orphaned')),
  outcome      text check (outcome in ('returned', 'raised')),   -- what the body is; null: none was kept
  type         text,
  body         bytea,                                        -- the result as the checkpoints' serializer writes it
  error        text,
  started_at   timestamptz not null default clock_timestamp(),
  finished_at  timestamptz,
  primary key (tenant, user_id, run_id, call_id, execution)
) with (fillfactor = 70);

-- Archives of workspaces in the bucket. The owner is a run or a sandbox of its own, so nothing refers to runs.
create table snapshots (
  tenant text, user_id text, snapshot_id uuid,
  run_id        uuid not null,
  thread_id     uuid,
  reason        text not null check (reason in ('drain', 'interrupt', 'request')),
  object_key    text not null,
  bytes         bigint not null,
  files         bigint not null,
  content_bytes bigint not null,
  skipped       bigint not null,
  created_at    timestamptz not null default clock_timestamp(),
  expires_at    timestamptz not null,
  primary key (tenant, user_id, snapshot_id)
);
create index snapshots_of_run on snapshots (tenant, user_id, run_id);
create index snapshots_of_thread on snapshots (tenant, user_id, thread_id) where thread_id is not null;
create index snapshots_expiring on snapshots (expires_at);

create table checkpoints (
  tenant text, user_id text, thread_id text, ns text, checkpoint_id text,
  parent_id text,
  seq       bigint generated always as identity,             -- the newest is the highest; ids carry hosts' clocks
  run_id    uuid,
  attempt   int not null default 0,
  metadata  json not null,
  blobs     json,                                            -- large channel values: {channel: version in checkpoint_blobs}
  type      text not null,
  body      bytea not null,                                  -- the checkpoint with its small channel values
  primary key (tenant, user_id, thread_id, ns, checkpoint_id)
);
create index checkpoints_newest on checkpoints (tenant, user_id, thread_id, ns, seq desc);

create table checkpoint_blobs (
  tenant text, user_id text, thread_id text, ns text, channel text,
  version text,                                              -- id of the checkpoint that wrote it first: forks never clash
  type text not null,
  body bytea not null,
  primary key (tenant, user_id, thread_id, ns, channel, version)
);

create table checkpoint_writes (
  tenant text, user_id text, thread_id text, ns text, checkpoint_id text, task_id text,
  slot smallint,                                             -- 0: a task's ordinary writes in one row; below 0: special channels
  path text not null,
  type text not null,
  body bytea not null,
  primary key (tenant, user_id, thread_id, ns, checkpoint_id, task_id, slot)
);

-- A thread's states as JSON, for readers that have no LangGraph.
create table state_snapshots (
  tenant text, user_id text, thread_id text, ns text, checkpoint_id text,
  seq       bigint generated always as identity,
  run_id    uuid,
  parent_id text,
  "values"  json not null,                                   -- values by channel; large ones are null here …
  refs      json not null default '{}',                      -- … and named here: {channel: hex of state_blobs.hash}
  next      json not null,                                   -- [node]
  tasks     json not null,
  parent_results json not null default '{}',                 -- what the tasks of the parent came to: {task_id: result}
  metadata  json not null,
  created_at text not null,                                  -- the checkpoint's own time
  primary key (tenant, user_id, thread_id, ns, checkpoint_id)
);
create index state_snapshots_newest on state_snapshots (tenant, user_id, thread_id, ns, seq desc);

create table state_blobs (
  tenant text, user_id text, thread_id text, hash bytea,
  body text not null,                                        -- JSON
  primary key (tenant, user_id, thread_id, hash)
);
