-- What runs have used of models. No row refers to a run or a thread: what was spent stays spent when these are removed.

-- What one attempt has used of one model so far, in absolute numbers: a row that is written again counts once. Rows go to
-- daily_usage when the events of their run are forgotten, or the run is.
create table run_usage (
  tenant text, user_id text, run_id uuid, attempt int, model text,
  day             date not null default (clock_timestamp() at time zone 'UTC')::date,   -- when it was told of first
  calls           bigint not null,                           -- model calls that have ended, however they did …
  unmetered_calls bigint not null,                           -- … of these, those whose tokens nobody has told …
  unpriced_calls  bigint not null,                           -- … and those with tokens that have no price
  input_tokens          bigint not null,                     -- cached ones included
  output_tokens         bigint not null,
  cache_read_tokens     bigint not null,
  cache_creation_tokens bigint not null,
  cost_usd        double precision not null,                 -- of the tokens that have a price
  primary key (tenant, user_id, run_id, attempt, model)
) with (fillfactor = 70);
create index run_usage_of_day on run_usage (day, tenant);

-- Sums of the rows that were in run_usage.
create table daily_usage (
  tenant text, day date, user_id text, model text,
  calls           bigint not null,
  unmetered_calls bigint not null,
  unpriced_calls  bigint not null,
  input_tokens          bigint not null,
  output_tokens         bigint not null,
  cache_read_tokens     bigint not null,
  cache_creation_tokens bigint not null,
  cost_usd        double precision not null,
  primary key (tenant, day, user_id, model)
);
create index daily_usage_of_day on daily_usage (day);
