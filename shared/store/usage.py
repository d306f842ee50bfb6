"""What runs have used of models: of one run, and in sums. Executors write it, see `fleet.executor.run_usage`.

Rows of attempts (`run_usage`) become sums of days (`daily_usage`) when the events of their run are forgotten; neither goes
with a run or a thread that is removed.
"""

from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal, LiteralString, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Owner

Connection = AsyncConnection[Any]

By = Literal["day", "model", "user", "tenant"]


@dataclass(frozen=True, slots=True)
class Used:
    """Model calls that have ended, and what they took."""

    calls: int
    unmetered_calls: int
    """Those of them whose tokens nobody has told: they failed or were broken off, or their provider sends none."""
    unpriced_calls: int
    """Those of them whose tokens are known and have no price."""
    input_tokens: int
    """Cached ones included."""
    output_tokens: int
    cache_read_tokens: int
    cache_creation_tokens: int
    cost_usd: float | None
    """What the tokens with a price cost, in US dollars; None if there are only others."""


class Sums(NamedTuple):
    """Everything together, and by the names that were asked for, in order."""

    total: Used
    by_name: list[tuple[str, Used]]


COLUMNS: LiteralString = """calls, unmetered_calls, unpriced_calls, input_tokens, output_tokens, cache_read_tokens,
  cache_creation_tokens, cost_usd"""
"""The columns of both tables that add up."""

ADDED: LiteralString = """sum(calls)::bigint as calls, sum(unmetered_calls)::bigint as unmetered_calls,
  sum(unpriced_calls)::bigint as unpriced_calls, sum(input_tokens)::bigint as input_tokens,
  sum(output_tokens)::bigint as output_tokens, sum(cache_read_tokens)::bigint as cache_read_tokens,
  sum(cache_creation_tokens)::bigint as cache_creation_tokens, sum(cost_usd) as cost_usd"""
"""Each of them added up, under its name."""

_COSTLY_FIRST: LiteralString = "cost_usd desc, input_tokens + output_tokens desc, name"
_NAMES: dict[By, LiteralString] = {
    "day": "day::text",
    "model": "model",
    "user": "case when %(tenant)s::text is null then tenant || '/' || user_id else user_id end",
    "tenant": "tenant",
}


async def of_run(pool: Pool, owner: Owner, thread_id: UUID | None, run_id: UUID) -> Sums | None:
    """What all attempts of a run have used, by model; None once its events are forgotten. Raises NotFound."""
    values = {**owner._asdict(), "thread_id": thread_id, "run_id": run_id}
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select journal_expired from runs where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
               and kind = 'run' and (%(thread_id)s::uuid is null or thread_id = %(thread_id)s::uuid)""",
            values,
        )
        run = await cursor.fetchone()
        if run is None:
            raise NotFound("Run not found.")
        if run[0]:
            return None
        source: LiteralString = f"""select model as name, {COLUMNS} from run_usage
          where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s"""
        return await _add_up(connection, source, "name", {**values, "limit": None, "offset": 0})


async def in_days(
    connection: Connection,
    tenant: str | None,
    first: date,
    last: date,
    by: By,
    *,
    user_id: str | None = None,
    limit: int,
    offset: int = 0,
) -> Sums:
    """What was used from the first to the last of these days (UTC), of one tenant (None: of all), and of one user (None: of
    all). Days come in order, all else by what it cost, the most first; a user of all tenants is named tenant/user."""
    name = _NAMES[by]
    # Day by day: an index on days and tenants then leads to the one tenant's rows.
    source: LiteralString = f"""
      select {name} as name, {COLUMNS} from generate_series(%(first)s::date, %(last)s::date, interval '1 day') d (at)
        join run_usage on day = d.at::date
        where (%(tenant)s::text is null or tenant = %(tenant)s) and (%(user_id)s::text is null or user_id = %(user_id)s)
      union all
      select {name}, {COLUMNS} from daily_usage
        where day between %(first)s and %(last)s and (%(tenant)s::text is null or tenant = %(tenant)s)
          and (%(user_id)s::text is null or user_id = %(user_id)s)"""
    values = {
        "tenant": tenant,
        "user_id": user_id,
        "first": first,
        "last": last,
        "limit": limit,
        "offset": offset,
    }
    return await _add_up(connection, source, "name" if by == "day" else _COSTLY_FIRST, values)


async def _add_up(
    connection: Connection, source: LiteralString, order: LiteralString, values: dict[str, Any]
) -> Sums:
    """Add up what ``source`` selects, by its column ``name``."""
    query: LiteralString = f"""
      with added as materialized (
        select name, grouping(name) = 1 as is_total, {ADDED} from ({source}) used group by grouping sets ((name), ()))
      (select is_total, name, {COLUMNS} from added where is_total)
      union all
      (select is_total, name, {COLUMNS} from added where not is_total order by {order} limit %(limit)s offset %(offset)s)"""
    cursor = await connection.execute(query, values)
    rows = await cursor.fetchall()
    (total,) = (_used(row[2:]) for row in rows if row[0])
    return Sums(total, [(row[1], _used(row[2:])) for row in rows if not row[0]])


def _used(row: tuple[Any, ...]) -> Used:
    found = Used(*(value or 0 for value in row))
    if found.unpriced_calls and found.unpriced_calls == found.calls - found.unmetered_calls:
        return replace(found, cost_usd=None)
    return found
