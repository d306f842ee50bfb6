"""The group-commit writer: one statement for all runs, nothing lost, and nobody pays for a neighbour's mistake."""

import asyncio
import time
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection

from sandfleet.fleet.executor import fenced_rows
from sandfleet.fleet.executor.fenced_rows import (
    ChannelBlobRow,
    CheckpointRow,
    JournalRow,
    PendingWritesRow,
    Row,
    SnapshotRow,
    StateBlobRow,
    UsageRow,
)
from sandfleet.fleet.executor.fenced_writer import ExecutorStopped, FencedWriter, RowRefused
from sandfleet.shared.errors import Unavailable
from sandfleet.shared.ids import Fence, Owner
from tests.checkpoints.conftest import OWNER, StartRun, count
from tests.waiting import eventually


def event(seq: int, name: str = "updates", data: bytes = b"{}") -> JournalRow:
    return JournalRow(seq, name, data)


def checkpoint(thread: str, checkpoint_id: str, body: bytes = b"") -> CheckpointRow:
    return CheckpointRow(thread, "", checkpoint_id, None, None, b"{}", None, "bytes", body)


def one_of_each(thread: str) -> list[Row]:
    return [
        event(0, data='{"text":"é\\u0000"}'.encode()),
        CheckpointRow(thread, "ns", "c", "p", None, b'{"step":1}', b'{"ch":"c"}', "bytes", b"\x00\xff"),
        ChannelBlobRow(thread, "ns", "ch", "c", "bytes", b"large"),
        PendingWritesRow(thread, "ns", "c", "task", -3, "path", "bytes", b"w"),
        SnapshotRow(
            thread, "ns", "c", None, None, b'{"ch":null}', b"{}", b"[]", b"[]", b'{"t":1}', b"{}", "2026"
        ),
        StateBlobRow(thread, b"\x00" * 32, b'"large"'),
        UsageRow("m", 1, 0, 0, 10, 5, 2, 1, 0.5),
    ]


async def test_one_statement_writes_what_all_runs_have_pending(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """All kinds of rows of twenty runs in one transaction. Breaks if each submission is written by itself."""
    fences = [await start_run() for _ in range(20)]
    await asyncio.gather(*(writer.submit(f, one_of_each(f"all-{n}")) for n, f in enumerate(fences)))
    assert writer.flushes == 1
    assert writer.rows == 140
    cursor = await connection.execute(
        "select count(distinct xmin::text), count(*) from checkpoints where thread_id like 'all-%'"
    )
    assert await cursor.fetchone() == (1, 20)


async def test_rows_come_back_as_they_were(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks if a column is packed as another type: null, negative numbers, bytes and U+0000 in JSON are among them."""
    fence = await start_run()
    await writer.write(fence, one_of_each("kept"))
    for table, columns, expected in (
        ("journal", "seq, event, data", (0, "updates", '{"text":"é\\u0000"}')),
        (
            "checkpoints",
            "attempt, ns, parent_id, run_id, metadata::text, blobs, body",
            (1, "ns", "p", None, '{"step":1}', {"ch": "c"}, b"\x00\xff"),
        ),
        ("checkpoint_blobs", "channel, version, body", ("ch", "c", b"large")),
        ("checkpoint_writes", "task_id, slot, path, body", ("task", -3, "path", b"w")),
        (
            "state_snapshots",
            '"values"::text, parent_id, parent_results, created_at',
            ('{"ch":null}', None, {"t": 1}, "2026"),
        ),
        ("state_blobs", "hash, body", (b"\x00" * 32, '"large"')),
    ):
        where = "run_id = %s" if table == "journal" else "thread_id = 'kept'"
        cursor = await connection.execute(
            f"select {columns} from {table} where {where}".encode(),
            [fence.key.run_id] if table == "journal" else None,
        )
        assert await cursor.fetchall() == [expected], table


async def test_database_order_is_the_order_of_submission(
    writer: FencedWriter, connection: AsyncConnection[Any]
) -> None:
    """The newest checkpoint is the one with the highest sequence. Breaks without the order in the insert."""
    names = [f"{n * 7919 % 200:03}" for n in range(200)]
    await asyncio.gather(*(writer.submit(OWNER, [checkpoint("order", name)]) for name in names))
    cursor = await connection.execute(
        "select checkpoint_id from checkpoints where thread_id = 'order' order by seq"
    )
    assert [name for (name,) in await cursor.fetchall()] == names


async def test_a_row_that_is_repeated_in_one_flush_is_written_as_it_was_last(
    writer: FencedWriter, connection: AsyncConnection[Any]
) -> None:
    """Breaks without putting them together: PostgreSQL refuses to update a row twice in one statement."""
    await asyncio.gather(
        *(writer.submit(OWNER, [checkpoint("twice", "c", body)]) for body in (b"1", b"2", b"3"))
    )
    assert writer.flushes == 1
    cursor = await connection.execute("select body from checkpoints where thread_id = 'twice'")
    assert await cursor.fetchall() == [(b"3",)]


@pytest.mark.parametrize(
    "bad",
    [
        event(5, name="a\0b"),
        event(5, name="a\ud800b"),
        event(5, data=b"\xff"),
        event(2**40),
        checkpoint("bad", "c" * 10_000_000),
        checkpoint("bad", "c")._replace(metadata=b"{nonsense"),
    ],
    ids=["nul", "surrogate", "utf8", "number", "key", "json"],
)
async def test_a_bad_row_fails_only_its_own_submission(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun, bad: Row
) -> None:
    """Whoever refuses it: our packing or PostgreSQL. Breaks without splitting the flush, or if an error of the packing
    counts as a lost connection."""
    fences = [await start_run() for _ in range(9)]
    rows: list[list[Row]] = [[event(0)] for _ in fences]
    rows[4] = [event(0), bad]
    results = await asyncio.gather(
        *(writer.submit(f, r) for f, r in zip(fences, rows, strict=True)), return_exceptions=True
    )
    expected: list[type] = [type(None)] * 9
    expected[4] = RowRefused
    assert [type(result) for result in results] == expected
    kept = [await count(connection, "journal", run_id=fence.key.run_id) for fence in fences]
    assert kept == [1, 1, 1, 1, 0, 1, 1, 1, 1]


async def test_a_refusal_does_not_quote_the_data(writer: FencedWriter) -> None:
    """Messages end up in logs. Breaks if PostgreSQL's own message, which quotes what it refuses, is passed on."""
    with pytest.raises(RowRefused) as caught:
        await writer.write(OWNER, [checkpoint("bad", "c")._replace(metadata=b"{secret")])
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_a_lost_connection_loses_no_row(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """The connection is killed again and again while rows are written. Breaks without writing again: the submissions under
    way would fail. It is killed once it has written something: where connecting takes longer than a fixed pause, no
    connection would live long enough to write."""
    fence = await start_run()
    kills = 0

    async def kill() -> None:
        nonlocal kills
        while True:
            cursor = await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sandfleet-writer'"
                " and datname = current_database()"
            )
            kills += len(await cursor.fetchall())
            written = writer.flushes
            await eventually(lambda: writer.flushes > written, what="a write after the loss")

    killer = asyncio.create_task(kill())
    seq = 0
    while kills < 5 or seq < 100:
        await asyncio.gather(*(writer.submit(fence, [event(seq + n)]) for n in range(10)))
        seq += 10
    killer.cancel()
    await asyncio.gather(killer, return_exceptions=True)
    cursor = await connection.execute(
        "select count(*), max(seq) from journal where run_id = %s", (fence.key.run_id,)
    )
    assert await cursor.fetchone() == (seq, seq - 1)


async def test_flushes_are_bounded(database: str, connection: AsyncConnection[Any]) -> None:
    """By rows and by bytes; what is larger than the bound still goes, alone. Breaks without either bound."""
    writer = FencedWriter(database, max_rows=10, max_bytes=1000)
    await writer.start()
    await asyncio.gather(*(writer.submit(OWNER, [checkpoint("bound", f"r{n}")]) for n in range(25)))
    assert writer.flushes == 3
    bodies = [b"x" * 400, b"x" * 400, b"x" * 5000, b"x" * 400, b"x" * 400]
    await asyncio.gather(
        *(writer.submit(OWNER, [checkpoint("bound", f"b{n}", body)]) for n, body in enumerate(bodies))
    )
    assert writer.flushes == 3 + 3
    await writer.stop()
    assert await count(connection, "checkpoints", thread_id="bound") == 30


async def test_stopping_writes_what_is_pending(database: str, connection: AsyncConnection[Any]) -> None:
    """Also when nothing was written yet. Afterwards nothing is taken any more."""
    writer = FencedWriter(database)
    await writer.start()
    futures = [writer.submit(OWNER, [checkpoint("stop", f"{n}")]) for n in range(700)]
    await writer.stop()
    await asyncio.gather(*futures)
    assert await count(connection, "checkpoints", thread_id="stop") == 700
    with pytest.raises(Unavailable):
        await writer.write(OWNER, [checkpoint("stop", "late")])


async def test_stopping_ends_without_a_database(unused_tcp_port: int) -> None:
    """What could not be written fails. Breaks without the deadline: the writer would try for ever."""
    writer = FencedWriter(f"postgresql://nobody@127.0.0.1:{unused_tcp_port}/none")
    await writer.start()
    futures = [writer.submit(OWNER, [checkpoint("t", f"{n}")]) for n in range(3)]
    begun = time.monotonic()
    await writer.stop(deadline_s=0.2)
    assert time.monotonic() - begun < 30
    results = await asyncio.gather(*futures, return_exceptions=True)
    assert [type(result) for result in results] == [ExecutorStopped] * 3


async def test_a_cancelled_wait_takes_nothing_back(
    writer: FencedWriter, connection: AsyncConnection[Any]
) -> None:
    """`drain` still waits for it. Breaks without the shield in `write`: the cancelled future would count as done."""
    waiting = asyncio.create_task(writer.write(OWNER, [checkpoint("cancelled", "c")]))
    await asyncio.sleep(0)
    waiting.cancel()
    await writer.drain()
    assert await count(connection, "checkpoints", thread_id="cancelled") == 1


async def test_draining_waits_for_all_that_was_submitted(
    database: str, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Whether it is written or fails."""
    writer = FencedWriter(database, max_rows=1)
    await writer.start()
    await writer.drain()
    gone = Fence((await start_run()).key, 9)
    futures = [writer.submit(OWNER, [checkpoint("drain", f"{n}")]) for n in range(5)]
    futures.append(writer.submit(gone, [event(0)]))
    await writer.drain()
    assert all(future.done() for future in futures)
    assert await count(connection, "checkpoints", thread_id="drain") == 5
    await writer.stop()


@pytest.mark.parametrize("analyzed", [False, True], ids=["new", "small"])
async def test_no_lookup_scans_a_table(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun, analyzed: bool
) -> None:
    """Its plans are made once, while tables may be small, and kept: with 100,000 runs a scan per flush would be the end.

    In a new database it breaks without the statistics that the schema comes with: another index that begins with the owner
    looks as good, and leads over all runs of a user. Once PostgreSQL knows how few runs there are, it breaks without
    `enable_seqscan` and `enable_bitmapscan` off: it would read the few pages.
    """
    fence = await start_run()
    if analyzed:
        for n in range(60):
            await start_run(Owner(OWNER.tenant, f"user-{n % 4}"))
        await connection.execute("vacuum analyze runs")
    query, parameters = fenced_rows.statement([(fence, one_of_each("plan"))])
    async with await writer._connect() as own:
        cursor = await own.execute(b"explain " + query.encode(), parameters)
        plan = "\n".join(line for (line,) in await cursor.fetchall())
    assert "Index Scan using runs_pkey on runs" in plan
    assert "Seq Scan" not in plan


async def test_a_deadlock_is_tried_again(
    database: str, writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks if a deadlock counts as the rows' fault: splitting would end in refusing them."""
    first, second = sorted([await start_run(), await start_run()])
    async with await psycopg.AsyncConnection.connect(database) as other:
        await other.execute("set deadlock_timeout = '10s'")  # the writer is the one that is told
        await other.execute("select 1 from runs where run_id = %s for update", (second.key.run_id,))
        write = [writer.submit(fence, [event(0)]) for fence in (first, second)]

        async def blocked() -> bool:
            cursor = await connection.execute(
                "select 1 from pg_stat_activity where application_name = 'sandfleet-writer' and wait_event_type = 'Lock'"
            )
            return await cursor.fetchone() is not None

        await eventually(blocked, what="the writer waits for the second run")
        await other.execute("select 1 from runs where run_id = %s for update", (first.key.run_id,))
        await other.commit()
    await asyncio.gather(*write)
    for fence in (first, second):
        assert await count(connection, "journal", run_id=fence.key.run_id) == 1
