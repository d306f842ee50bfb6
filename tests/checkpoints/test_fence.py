"""One effective executor: what was superseded writes nothing, whatever it had under way."""

import asyncio
from typing import Annotated, Any, TypedDict

import psycopg
import pytest
from langgraph.graph import END, START, StateGraph
from psycopg import AsyncConnection

from sandfleet.fleet.executor.fenced_rows import JournalRow, PendingWritesRow, Row
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.shared.errors import Superseded
from sandfleet.shared.ids import Fence
from tests.checkpoints.conftest import MakeSaver, StartRun, count, take_over
from tests.waiting import eventually


def event(seq: int) -> Row:
    return JournalRow(seq, "updates", b"{}")


async def test_a_superseded_attempt_writes_nothing(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks without the attempt in the fence."""
    fence = await start_run()
    await take_over(connection, fence)
    with pytest.raises(Superseded):
        await writer.write(fence, [event(0)])
    assert await count(connection, "journal", run_id=fence.key.run_id) == 0


async def test_nothing_is_written_after_the_end_of_the_run(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks without the status in the fence: the attempt alone stays the same."""
    fence = await start_run()
    await connection.execute("update runs set status = 'success' where run_id = %s", (fence.key.run_id,))
    with pytest.raises(Superseded):
        await writer.write(fence, [event(0)])
    assert await count(connection, "journal", run_id=fence.key.run_id) == 0


async def test_a_failed_fence_affects_only_its_run(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """All in one flush. Breaks if a flush is refused as a whole, or if rows are not joined to their own fence."""
    fences = [await start_run() for _ in range(5)]
    await take_over(connection, fences[2])
    before = writer.flushes
    results = await asyncio.gather(
        *(writer.submit(fence, [event(0), event(1)]) for fence in fences), return_exceptions=True
    )
    assert writer.flushes == before + 1
    assert [type(result) for result in results] == [type(None)] * 2 + [Superseded] + [type(None)] * 2
    assert [await count(connection, "journal", run_id=fence.key.run_id) for fence in fences] == [
        2,
        2,
        0,
        2,
        2,
    ]


async def test_two_attempts_of_a_run_in_one_process(
    writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """A process may claim again what it lost. Breaks if repeated rows are put together over attempts: the last one, of the
    attempt that lost, would win."""
    old = await start_run()
    await take_over(connection, old)
    new = Fence(old.key, 2)

    def write(body: bytes) -> Row:
        return PendingWritesRow("two-attempts", "", "checkpoint", "task", 0, "", "bytes", body)

    results = await asyncio.gather(
        writer.submit(new, [write(b"new")]), writer.submit(old, [write(b"old")]), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), Superseded]
    cursor = await connection.execute("select body from checkpoint_writes where thread_id = 'two-attempts'")
    assert await cursor.fetchall() == [(b"new",)]


async def test_a_successor_waits_for_a_write_that_passed_its_fence(
    database: str, writer: FencedWriter, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """What the successor reads after its claim does not change any more.

    The write is held in mid-statement, behind a row with the same key that another transaction has not committed yet.
    Breaks with a fence that only looks (`exists`, or no `for share`): the successor's claim does not wait, reads no event,
    and then one appears.
    """
    fence = await start_run()
    async with await psycopg.AsyncConnection.connect(database) as blocker:
        await blocker.execute(
            "insert into journal values (%s, %s, %s, 1, 0, 'x', '{}')", (*fence.key[:2], fence.key.run_id)
        )
        write = writer.submit(fence, [event(0), event(1)])
        await eventually(
            lambda: waits(connection, "sandfleet-writer"), what="the write waits for the blocker"
        )
        async with await psycopg.AsyncConnection.connect(
            database, autocommit=True, application_name="successor"
        ) as successor:
            claim = asyncio.create_task(take_over(successor, fence))
            await eventually(lambda: waits(connection, "successor"), what="the successor waits for the write")
            await blocker.rollback()
            await claim
            seen = await count(successor, "journal", run_id=fence.key.run_id)
    await write
    assert seen == 2 == await count(connection, "journal", run_id=fence.key.run_id)


async def waits(connection: AsyncConnection[Any], name: str) -> bool:
    cursor = await connection.execute(
        "select 1 from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'", (name,)
    )
    return await cursor.fetchone() is not None


class State(TypedDict):
    xs: Annotated[list[str], lambda old, new: old + new]


@pytest.mark.parametrize("durability", ["sync", "exit"])
async def test_a_graph_ends_when_it_is_superseded(
    make_saver: MakeSaver, connection: AsyncConnection[Any], start_run: StartRun, durability: Any
) -> None:
    """It is taken over in its second node; nothing that it did from then on is kept."""
    fence = await start_run()
    ran: list[str] = []

    async def second(_: State) -> State:
        await take_over(connection, fence)
        return {"xs": ["b"]}

    def third(_: State) -> State:
        ran.append("third")
        return {"xs": ["c"]}

    builder: Any = StateGraph(State)
    builder.add_node("first", lambda _: {"xs": ["a"]})
    builder.add_node("second", second)
    builder.add_node("third", third)
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", "third")
    builder.add_edge("third", END)
    config = {"configurable": {"thread_id": str(fence.key.run_id)}}
    graph = builder.compile(checkpointer=make_saver(fence))
    with pytest.raises(Superseded):
        await graph.ainvoke({"xs": []}, config, durability=durability)
    kept = await builder.compile(checkpointer=make_saver()).aget_state(config)
    if durability == "sync":
        assert ran == []
        assert kept.values == {"xs": ["a"]}
    else:
        assert kept.values == {}


async def test_deleting_is_fenced_too(
    make_saver: MakeSaver, connection: AsyncConnection[Any], start_run: StartRun
) -> None:
    """Breaks without the fence in the saver's transactions: a paused executor would delete its successor's checkpoints."""
    fence = await start_run()
    saver = make_saver(fence)
    builder: Any = StateGraph(State)
    builder.add_node("a", lambda _: {"xs": ["a"]})
    builder.add_edge(START, "a")
    thread_id = str(fence.key.run_id)
    await builder.compile(checkpointer=saver).ainvoke({"xs": []}, {"configurable": {"thread_id": thread_id}})
    written = await count(connection, "checkpoints", thread_id=thread_id)
    await take_over(connection, fence)
    for work in (
        saver.adelete_thread(thread_id),
        saver.adelete_for_runs([thread_id]),
        saver.aprune([thread_id]),
        saver.acopy_thread(thread_id, "other"),
    ):
        with pytest.raises(Superseded):
            await work
    assert await count(connection, "checkpoints") >= written == 3
    assert await count(connection, "checkpoints", thread_id="other") == 0
