-- What containers, networks and folders are labelled with: several deployments may share an engine. One row.
create table deployment (
  deployment_id uuid not null default gen_random_uuid()
);
create unique index deployment_is_one on deployment ((true));
insert into deployment default values;

alter table hosts
  add column machine text,                                  -- of its folder, as /etc/machine-id or the machine's name
  add column folder  text;                                  -- SANDFLEET_HOST_DIR, absolute
