-- Statistics before there are rows. Without any, PostgreSQL takes every key for as selective as every other, and looks a
-- run or a thread up by another index that begins with its owner: over all that a user has, until the first autovacuum.
-- So it is told that all rows have one owner, and everything else about them is unique.
alter table runs alter column tenant set (n_distinct = 1), alter column user_id set (n_distinct = 1);
alter table threads alter column tenant set (n_distinct = 1), alter column user_id set (n_distinct = 1);
insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, multitask_strategy, timeout_s, kwargs, metadata)
  select n, n, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), '', 'run', '', 0, '', 0, '{}', '{}' from generate_series(1, 1000) n;
insert into threads (tenant, user_id, thread_id) select n, n, gen_random_uuid() from generate_series(1, 1000) n;
analyze runs, threads;
-- Within a subtransaction of its own, TRUNCATE makes the tables count as never vacuumed, which PostgreSQL takes for ten
-- pages; otherwise it would know that they are empty, and scan them.
do $$ begin truncate runs, threads restart identity; exception when others then raise; end $$;
alter table runs alter column tenant reset (n_distinct), alter column user_id reset (n_distinct);
alter table threads alter column tenant reset (n_distinct), alter column user_id reset (n_distinct);
