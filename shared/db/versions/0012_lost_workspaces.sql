-- Workspaces of interrupted runs that could not be kept: whoever resumes has to hear why its sandbox does not begin with them. The last
-- one of each thread; an `interrupt` snapshot of the thread that is younger has made it good. Written by the run's attempt, which
-- locks the thread, then the run.
create table lost_workspaces (
  tenant text, user_id text, thread_id uuid,
  run_id uuid not null,
  reason text not null,
  lost_at timestamptz not null default clock_timestamp(),
  primary key (tenant, user_id, thread_id),
  foreign key (tenant, user_id, thread_id) references threads on delete cascade
);
