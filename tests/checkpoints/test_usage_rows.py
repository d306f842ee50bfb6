"""What an attempt has used of models: fenced like all that it writes, counted once, and at no statement's cost."""

import asyncio
from typing import Any

import pytest
from psycopg import AsyncConnection

from sandfleet.fleet.executor.fenced_rows import JournalRow, PendingWritesRow, UsageRow
from sandfleet.fleet.executor.fenced_writer import FencedWriter, RowRefused
from sandfleet.fleet.executor.run_usage import MODELS, OTHER, RunUsage
from sandfleet.shared.errors import Superseded
from sandfleet.shared.ids import Fence
from sandfleet.shared.prices import Price, Usage
from tests.checkpoints.conftest import StartRun, count, take_over
from tests.streams.wire import open_wire
from tests.waiting import eventually

EVENT = JournalRow(0, "updates", b"{}")
PRICES = {"dear": Price(input=1000, output=2000)}


def used(calls: int) -> UsageRow:
    return UsageRow("m", calls, 0, 0, 10 * calls, calls, 0, 0, 0.25 * calls)


def usage_of(fence: Fence, writer: FencedWriter) -> RunUsage:
    return RunUsage(fence, writer, PRICES, lambda usage, cost: None)


async def kept(connection: AsyncConnection[Any], fence: Fence) -> list[tuple[Any, ...]]:
    """Attempt, model, calls, input tokens and cost of what is kept of a run."""
    cursor = await connection.execute(
        "select attempt, model, calls, input_tokens, cost_usd from run_usage where run_id = %s order by 1, 2",
        (fence.key.run_id,),
    )
    return await cursor.fetchall()


@pytest.mark.parametrize("way", ["submitted", "put off"])
async def test_a_superseded_attempt_accounts_for_nothing(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun, way: str
) -> None:
    """Breaks without the fence: what it had used before counts, and nothing later."""
    fence = await start_run()
    await writer.write(fence, [used(1)])
    await take_over(connection, fence)
    usage = usage_of(fence, writer)
    usage.add("m", Usage(1, 1))
    late = usage.settle() if way == "put off" else writer.write(fence, [used(2)])
    with pytest.raises(Superseded):
        await late
    assert await kept(connection, fence) == [(1, "m", 1, 10, 0.25)]


async def test_each_attempt_has_its_own_account(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """What was spent by an attempt that died is spent. Breaks without the attempt in the key."""
    fence = await start_run()
    await writer.write(fence, [used(2)])
    await take_over(connection, fence)
    await writer.write(Fence(fence.key, 2), [used(1)])
    assert await kept(connection, fence) == [(1, "m", 2, 20, 0.5), (2, "m", 1, 10, 0.25)]


async def test_what_was_written_and_not_confirmed_counts_once(
    database: str, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """The reply is lost on the way, and the rows are written again. Breaks when rows add up in place of replacing."""
    fence = await start_run()
    async with open_wire(database) as (wire, url):
        writer = FencedWriter(url)
        await writer.start()
        await writer.write(fence, [used(1)])
        wire.silence(replies_only=True)
        write = writer.submit(fence, [used(2)])

        async def there() -> bool:
            return (await kept(connection, fence))[0][2] == 2

        await eventually(there, what="the row without its reply")
        assert not write.done()
        await wire.drop()
        await wire.mend()
        await write
        await writer.stop()
    assert await kept(connection, fence) == [(1, "m", 2, 20, 0.5)]


async def test_a_model_call_costs_no_statement(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Its account goes along with what the run writes next. Breaks when it is submitted by itself, and so before that."""
    fence, other = await start_run(), await start_run()
    usage = usage_of(fence, writer)
    before = writer.flushes
    usage.add("dear", Usage(10, 5))
    usage.add("dear", Usage(10, 5))
    await writer.write(other, [EVENT])
    assert await kept(connection, fence) == []
    await writer.write(fence, [EVENT])
    await usage.settle()
    assert writer.flushes == before + 2
    assert await kept(connection, fence) == [(1, "dear", 2, 20, 0.04)]


async def test_what_no_row_takes_along_is_kept_all_the_same(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """A node may call models for minutes, and its executor may die. Breaks without the timer. The second model is called in a
    thread, as synchronous nodes do; breaks when its account is put off there."""
    fence = await start_run()
    usage = usage_of(fence, writer)
    usage.add("a", Usage(10, 5))

    async def calls() -> int:
        return sum(row[2] for row in await kept(connection, fence))

    async def is_kept(number: int) -> bool:
        return await calls() == number

    await eventually(lambda: is_kept(1), what="the first call")
    await asyncio.to_thread(usage.add, "b", Usage(10, 5))
    await eventually(lambda: is_kept(2), what="the second call")


async def test_a_writer_that_stops_keeps_what_was_put_off(
    database: str, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks when it goes with the process."""
    fence = await start_run()
    writer = FencedWriter(database)
    await writer.start()
    usage_of(fence, writer).add("dear", Usage(10, 5))
    await writer.stop()
    assert await kept(connection, fence) == [(1, "dear", 1, 10, 0.02)]


async def test_a_row_that_is_refused_takes_no_account_along(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks when `settle` does not write anew what went along with it."""
    fence = await start_run()
    usage = usage_of(fence, writer)
    usage.add("dear", Usage(10, 5))
    with pytest.raises(RowRefused):
        await writer.write(fence, [PendingWritesRow("t", "", "c", "task", 0, "\0", "bytes", b"")])
    await usage.settle()
    assert await kept(connection, fence) == [(1, "dear", 1, 10, 0.02)]


async def test_odd_models_cost_no_run_its_checkpoint(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Names and numbers come from graphs and providers. Breaks when PostgreSQL is given what it cannot hold, or names without
    end; the account is in one write with the run's own rows."""
    fence = await start_run()
    usage = usage_of(fence, writer)
    said = {"input_tokens": 10**30, "output_tokens": -5, "input_token_details": {"cache_read": 10**30}}
    for name in ("a\0b", "\ud800", "x" * 10_000, *(f"m{n}" for n in range(2 * MODELS))):
        for _ in range(2):
            usage.add(name, Usage.of(said))
    await writer.write(fence, [EVENT])
    await usage.settle()
    rows = await kept(connection, fence)
    assert len(rows) == MODELS + 1
    assert max(len(row[1]) for row in rows) == 200
    assert sum(row[2] for row in rows) == 2 * (3 + 2 * MODELS)
    assert {row[1]: row[2] for row in rows}[OTHER] == 2 * (3 + MODELS)
    assert {row[3] for row in rows} == {10**12}
    assert await count(connection, "journal", run_id=fence.key.run_id) == 1


async def test_what_is_not_known_is_counted_as_such(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks when tokens without a price, or calls without tokens, pass for free ones."""
    fence = await start_run()
    usage = usage_of(fence, writer)
    usage.add("dear-2026", Usage(10, 5))
    usage.add("cheap", Usage(10, 5))
    usage.add("cheap", None)
    await usage.settle()
    cursor = await connection.execute(
        "select model, calls, unmetered_calls, unpriced_calls, cost_usd from run_usage where run_id = %s order by 1",
        (fence.key.run_id,),
    )
    assert await cursor.fetchall() == [("cheap", 2, 1, 1, 0.0), ("dear-2026", 1, 0, 0, 0.02)]
