"""Usage outlives its runs: it is added up by day, once, when they are forgotten."""

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from sandfleet.shared.ids import new_id
from sandfleet.shared.store.sweep import sweep
from sandfleet.shared.store.usage import By, Sums, in_days

DAY_S = 24 * 3600
Connection = psycopg.AsyncConnection[Any]


def day(age: int) -> date:
    """So many days ago."""
    return datetime.now(UTC).date() - timedelta(age)


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as opened:
        await opened.execute("truncate runs, run_usage, daily_usage")
        yield opened


async def spend(
    connection: Connection,
    age: int,
    *,
    tenant: str = "a",
    user: str = "u",
    model: str = "m",
    run: UUID | None = None,
) -> None:
    """An attempt's account: one call for a dollar."""
    await connection.execute(
        "insert into run_usage values (%s, %s, %s, 1, %s, %s, 1, 0, 0, 10, 5, 2, 1, 1)",
        (tenant, user, run or new_id(), model, day(age)),
    )


async def keep_run(connection: Connection, run: UUID, *, forgotten: bool) -> None:
    """A run that is over, with its events or without."""
    await connection.execute(
        """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
             multitask_strategy, timeout_s, kwargs, metadata, finished_at, journal_expired)
           values ('a', 'u', %s, gen_random_uuid(), gen_random_uuid(), 'g', 'run', 'default', 1, 'success', 'enqueue', 60,
             '{}', '{}', clock_timestamp(), %s)""",
        (run, forgotten),
    )


async def swept(connection: Connection, usage_retention_s: float = 400 * DAY_S) -> None:
    await sweep(connection, 5, 15, 3600, 7 * DAY_S, usage_retention_s=usage_retention_s)


async def counted(connection: Connection, table: str) -> int:
    row = await (await connection.execute(f"select count(*) from {table}".encode())).fetchone()
    assert row is not None
    return int(row[0])


async def sums(connection: Connection, by: By = "day", tenant: str | None = "a") -> Sums:
    return await in_days(connection, tenant, day(399), day(0), by, limit=100)


async def test_old_usage_is_added_up_and_nothing_is_lost_or_doubled(connection: Connection) -> None:
    """Red when a row is left in both tables or in none, or replaces the sum that is there already."""
    for _ in range(2):
        for age in (20, 20, 30, 0):
            await spend(connection, age)
        await spend(connection, 20, tenant="b")
        before = await sums(connection)
        await swept(connection)
        assert await sums(connection) == before
    assert (before.total.calls, before.total.input_tokens, before.total.cost_usd) == (8, 80, 8.0)
    assert [(name, used.calls) for name, used in before.by_name] == [
        (str(day(30)), 2),
        (str(day(20)), 4),
        (str(day(0)), 2),
    ]
    assert (await counted(connection, "run_usage"), await counted(connection, "daily_usage")) == (2, 3)


@pytest.mark.parametrize(("forgotten", "left"), [(False, 1), (True, 0)])
async def test_usage_of_a_run_stays_its_own_as_long_as_its_events_are_there(
    connection: Connection, forgotten: bool, left: int
) -> None:
    """Red without the look at the run: a row would be added up that its attempt may write again."""
    run = new_id()
    await keep_run(connection, run, forgotten=forgotten)
    await spend(connection, 20, run=run)
    await swept(connection)
    assert await counted(connection, "run_usage") == left


async def test_sums_are_forgotten_in_the_end(connection: Connection) -> None:
    """Red when they are kept for ever, or for less than was asked for."""
    for age in (20, 30):
        await spend(connection, age)
    for _ in range(2):  # added up, and then old
        await swept(connection, 25 * DAY_S)
    assert [name for name, _ in (await sums(connection)).by_name] == [str(day(20))]


async def test_sums_are_by_what_was_asked_for(connection: Connection) -> None:
    """From both tables; the costliest first. Red when one of them is left out, or tenants are mixed up."""
    for age, user, model in ((20, "u", "m"), (0, "u", "m"), (0, "v", "n")):
        await spend(connection, age, user=user, model=model)
    await spend(connection, 0, tenant="b", user="u")
    await swept(connection)

    async def calls(by: By, tenant: str | None) -> list[tuple[str, int]]:
        return [(name, used.calls) for name, used in (await sums(connection, by, tenant)).by_name]

    assert await calls("model", "a") == [("m", 2), ("n", 1)]
    assert await calls("user", "a") == [("u", 2), ("v", 1)]
    assert await calls("tenant", None) == [("a", 3), ("b", 1)]
    assert await calls("user", None) == [("a/u", 2), ("a/v", 1), ("b/u", 1)]
