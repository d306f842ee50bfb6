-- What one scaling decision leaves for the next, per pool, and when the next is due.
create table scaling (
  pool        text primary key,
  due_at      timestamptz not null default '-infinity',
  out_at_s    double precision,                              -- epoch seconds: when the pool grew last …
  low_since_s double precision,                              -- … since when it has had too much room, and …
  low_peak    int not null default 0                         -- … the most executors that would have been enough since
) with (fillfactor = 20);

alter table executors add column host_id text;                 -- the sandbox host of its machine, where they share one
