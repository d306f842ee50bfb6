"""What a schema promises to processes of older versions, which run on beside it, and what it asks of them; read from the catalog."""

import re
from typing import Any, NamedTuple

import psycopg

_CHECKED = """
with tables as (
  select c.oid, c.relname::text as name from pg_class c
    where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'v', 'm') and c.relname <> 'alembic_version'),
columns as (
  select t.name as on_table, a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as filled,
      a.attnotnull and not a.atthasdef and a.attidentity = '' as required
    from tables t join pg_attribute a on a.attrelid = t.oid and a.attnum > 0 and not a.attisdropped),
functions as (
  select p.proname::text as name, pg_get_function_result(p.oid) as result, p.pronargs::int as most, (p.pronargs - p.pronargdefaults)::int as least,
      array_to_string(array(select format_type(a, null) from unnest(p.proargtypes) with ordinality x (a, n) order by n), ', ') as arguments
    from pg_proc p where p.pronamespace = 'public'::regnamespace)
select kind, on_table, subject, columns from (
  select 'table' as kind, name as on_table, 'table ' || name as subject, '{}'::text[] as columns from tables
  union all select 'column', on_table, format('column %s.%s %s', on_table, name, type), array[name] from columns
  union all select 'column', on_table, format('null in %s.%s', on_table, name), array[name] from columns where not filled
  union all select 'column', on_table, format('an insert into %s without %s', on_table, name), array[name] from columns where not required
  union all select 'required', on_table, format('%s.%s in each insert', on_table, name), array[name] from columns where required
  union all select 'function', '', format('function %s(%s) returns %s', name, arguments, result), '{}' from functions
  union all select 'twice', '', format('function %s twice for %s arguments', name, n), '{}'
    from functions, generate_series(least, most) n group by name, n having count(*) > 1
  union all select 'unique', t.name, format('unique %s %s', t.name, pg_get_indexdef(i.indexrelid)), '{}'
    from tables t join pg_index i on i.indrelid = t.oid where i.indisunique
  union all select 'constraint', t.name, format('%s: %s', t.name, pg_get_constraintdef(k.oid)),
      array(select a.attname::text from pg_attribute a where a.attrelid = t.oid and a.attnum = any (k.conkey))
    from tables t join pg_constraint k on k.conrelid = t.oid where k.contype in ('c', 'f', 'x')
  union all select 'trigger', t.name, format('trigger %s on %s', g.tgname, t.name), '{}'
    from tables t join pg_trigger g on g.tgrelid = t.oid where not g.tgisinternal) s
"""
_NAME_OF_INDEX = re.compile(r"CREATE UNIQUE INDEX \S+ ON \S+ ")


class Schema(NamedTuple):
    """Promises as texts. Demands likewise, each with its table and the columns it concerns (none: all)."""

    promises: frozenset[str]
    demands: dict[str, tuple[str, frozenset[str]]]
    columns: frozenset[tuple[str, str]]
    tables: frozenset[str]


async def read_schema(connection: psycopg.AsyncConnection[Any]) -> Schema:
    """The schema as the connection's transaction sees it."""
    promises: set[str] = set()
    demands: dict[str, tuple[str, frozenset[str]]] = {}
    known: set[tuple[str, str]] = set()
    tables: set[str] = set()
    for kind, table, text, columns in await (await connection.execute(_CHECKED)).fetchall():
        subject = _NAME_OF_INDEX.sub("", text)
        if kind in ("table", "column", "function", "unique"):  # `on conflict` needs its unique index
            promises.add(subject)
        if kind in ("required", "unique", "constraint", "trigger", "twice"):
            demands[subject] = (table, frozenset(columns))
        if kind == "column":
            known.update((table, column) for column in columns)
        if kind == "table":
            tables.add(table)
    return Schema(frozenset(promises), demands, frozenset(known), frozenset(tables))


def breaks(before: Schema, after: Schema) -> set[str]:
    """What the step from ``before`` to ``after`` breaks for processes that were made for ``before``; a text each.

    They use tables, columns and functions that they know, and write rows without what they do not know. A call is ambiguous
    when two functions of the name take as many arguments: drivers say no types. A constraint on new columns alone is none of
    theirs, whatever is asked of tables that are new is neither.
    """
    found = {f"gone: {promise}" for promise in before.promises - after.promises}
    for demand, (table, columns) in after.demands.items():
        if demand in before.demands or (table and table not in before.tables):
            continue
        if (
            demand.endswith(" in each insert")
            or not columns
            or any((table, column) in before.columns for column in columns)
        ):
            found.add(f"new: {demand}")
    return found
