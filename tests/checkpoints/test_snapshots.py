"""States as JSON: what the API reads without LangGraph is what LangGraph itself would say."""

import uuid
from typing import Annotated, Any, TypedDict

import orjson
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt
from psycopg import AsyncConnection

from sandfleet.fleet.executor.fenced_rows import SnapshotRow
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.snapshots import INLINE_BYTES, interrupts_by_task, payload_rows, state_rows
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Fence, Owner
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import state_rows as stored
from tests.checkpoints.conftest import OWNER, MakeSaver, StartRun, count

LARGE = "x" * (INLINE_BYTES + 1)


class State(TypedDict, total=False):
    messages: Annotated[list[Any], add_messages]
    files: dict[str, str]


def chat(*nodes: Any) -> Any:
    builder: Any = StateGraph(State)
    before = START
    for n, node in enumerate(nodes):
        builder.add_node(f"n{n}", node)
        builder.add_edge(before, f"n{n}")
        before = f"n{n}"
    builder.add_edge(before, END)
    return builder


def answer(_: State) -> State:
    return {"messages": [AIMessage("hi", id="answer")]}


def ask(_: State) -> State:
    return {"messages": [AIMessage(str(interrupt("sure?")), id="asked")]}


class Thread:
    """A thread whose states are kept as the executor keeps them."""

    def __init__(self, writer: FencedWriter, make_saver: MakeSaver, pool: Pool, fence: Fence) -> None:
        self.id, self.fence, self.pool, self.writer = uuid.uuid4(), fence, pool, writer
        self.saver = make_saver(fence)
        self.known: set[bytes] = set()
        self.config: RunnableConfig = {
            "configurable": {"thread_id": str(self.id)},
            "metadata": {"graph_id": "g"},
        }

    async def run(self, builder: Any, given: Any) -> Any:
        """Run a graph, keep each state that it streams and then the newest one, and return that."""
        graph = builder.compile(checkpointer=self.saver)
        async for _, payload in graph.astream(
            given, self.config, stream_mode="checkpoints", subgraphs=True, durability="sync"
        ):
            parent = (payload["parent_config"] or {}).get("configurable", {})
            done = self.saver.take_writes(parent.get("checkpoint_ns", ""), parent.get("checkpoint_id", ""))
            rows = payload_rows(str(self.id), self.fence.key.run_id, payload, self.known, done)
            await self.writer.write(self.fence, rows)
        state = await graph.aget_state(self.config)
        await self.writer.write(
            self.fence, state_rows(str(self.id), self.fence.key.run_id, state, self.known)
        )
        return state

    async def newest(self, **options: Any) -> dict[str, Any]:
        state = await stored.newest(self.pool, OWNER, self.id, **options)
        assert state is not None
        return state

    async def history(self, **options: Any) -> list[dict[str, Any]]:
        return await stored.history(self.pool, OWNER, self.id, **options)


async def new_thread(writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun) -> Thread:
    return Thread(writer, make_saver, pool, await start_run())


def as_json(value: Any) -> Any:
    return orjson.loads(to_json(value))


async def test_each_state_reads_as_langgraph_says(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """All steps of a run, values and parents, and the metadata with what the run's config added. Breaks if a value's JSON
    differs from the stream's, or if the metadata is the stream's alone."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    builder = chat(answer, answer)
    await thread.run(builder, {"messages": [HumanMessage("hello", id="q")], "files": {"a": LARGE}})
    graph = builder.compile(checkpointer=thread.saver)
    expected = [state async for state in graph.aget_state_history(thread.config)]
    found = await thread.history()
    assert len(found) == 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["values"] == as_json(theirs.values)
        assert ours["next"] == list(theirs.next)
        assert ours["metadata"] == as_json(theirs.metadata)
        assert ours["metadata"]["graph_id"] == "g"
        assert ours["created_at"][:19] == theirs.created_at[:19]
        assert ours["checkpoint_id"] == theirs.config["configurable"]["checkpoint_id"]
        assert ours["checkpoint"] == {
            "thread_id": str(thread.id),
            "checkpoint_ns": "",
            "checkpoint_id": ours["checkpoint_id"],
        }
        parent = theirs.parent_config and theirs.parent_config["configurable"]["checkpoint_id"]
        assert ours["parent_checkpoint_id"] == parent
        assert (ours["parent_checkpoint"] or {}).get("checkpoint_id") == parent
        assert [task["name"] for task in ours["tasks"]] == [task.name for task in theirs.tasks]
        assert [task["id"] for task in ours["tasks"]] == [task.id for task in theirs.tasks]
        if ours["checkpoint_id"] != found[-1]["checkpoint_id"]:  # what came in was too large to be told twice
            assert [task["result"] for task in ours["tasks"]] == [
                as_json(task.result) for task in theirs.tasks
            ]


async def test_results_that_another_attempt_left_are_told(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """One of two tasks has ended, the other one fails; the run goes on from there, and only that one is done again. Breaks if
    the state that an attempt goes on from, which LangGraph tells with these results, is not kept once more."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    failures = [ValueError("once")]

    def fail(_: State) -> State:
        if failures:
            raise failures.pop()
        return {"messages": [AIMessage("made it", id="late")]}

    builder: Any = StateGraph(State)
    for name, node in (("ends", answer), ("fails", fail)):
        builder.add_node(name, node)
        builder.add_edge(START, name)
    with pytest.raises(ValueError, match="once"):
        await thread.run(builder, {"messages": []})
    thread.saver = make_saver(thread.fence)
    await thread.run(builder, None)
    expected = [s async for s in builder.compile(checkpointer=thread.saver).aget_state_history(thread.config)]
    results = [[task["result"] for task in state["tasks"]] for state in await thread.history()]
    assert results == [[as_json(task.result) for task in state.tasks] for state in expected]
    assert [len(each) for each in results] == [0, 2, 1]
    assert None not in results[1]


async def test_large_values_are_stored_once_per_content(
    writer: FencedWriter,
    make_saver: MakeSaver,
    pool: Pool,
    start_run: StartRun,
    connection: AsyncConnection[Any],
) -> None:
    """Breaks if they stay in the states' own rows, or if rows are submitted again for what this run has submitted."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    before = writer.rows
    await thread.run(chat(*[answer] * 10), {"messages": [], "files": {"a": LARGE}})
    assert len(await thread.history(limit=100)) == 12
    assert await count(connection, "state_blobs", thread_id=str(thread.id)) == 1
    cursor = await connection.execute(
        'select max(length("values"::text)) from state_snapshots where thread_id = %s', (str(thread.id),)
    )
    ((longest,),) = await cursor.fetchall()
    assert longest < 2000
    assert writer.rows - before < 12 * 4


async def test_interrupts_are_shown_and_answered(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """In the shape of the SDK: id and value, by task and for the whole state; gone once they are answered."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    state = await thread.run(chat(ask), {"messages": []})
    shown = await thread.newest()
    (task,) = shown["tasks"]
    assert set(task) == {"id", "name", "path", "error", "interrupts", "checkpoint", "state", "result"}
    assert shown["next"] == ["n0"]
    assert task["path"] == ["__pregel_pull", "n0"]
    assert shown["interrupts"] == task["interrupts"] == [{"id": state.interrupts[0].id, "value": "sure?"}]
    assert interrupts_by_task(state) == {task["id"]: task["interrupts"]}
    await thread.run(chat(ask), Command(resume="yes"))
    shown = await thread.newest()
    assert (shown["next"], shown["interrupts"], shown["tasks"]) == ([], [], [])
    assert shown["values"]["messages"][-1]["content"] == "yes"


async def test_an_interrupt_says_what_answer_it_wants(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """Where its graph does. Breaks if the schema is dropped on the way to the SDK, which has a field for it."""
    schema = {"type": "boolean"}

    def ask_for_a_boolean(_: State) -> State:
        return {"messages": [AIMessage(str(interrupt("sure?", response_schema=schema)))]}

    thread = await new_thread(writer, make_saver, pool, start_run)
    await thread.run(chat(ask_for_a_boolean), {"messages": []})
    (shown,) = (await thread.newest())["interrupts"]
    assert shown["response_schema"] == schema


async def test_subgraphs_are_read_by_namespace_or_inside_their_task(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """A task that is a subgraph names its checkpoint, or with `subgraphs` holds its state. Breaks if the rows of
    subgraphs are not kept by namespace."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    await thread.run(chat(chat(answer, ask).compile()), {"messages": []})
    (task,) = (await thread.newest())["tasks"]
    namespace = task["checkpoint"]["checkpoint_ns"]
    assert namespace == f"n0:{task['id']}"
    assert task["state"] is None
    inner = await thread.newest(ns=namespace)
    assert inner["next"] == ["n1"]
    assert inner["checkpoint"]["checkpoint_ns"] == namespace
    (full,) = (await thread.newest(subgraphs=True))["tasks"]
    assert full["checkpoint"] is None
    assert full["state"] == inner


async def test_history_is_narrowed(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """By limit, `before`, one checkpoint and metadata. Breaks if any of them is left out, or if unknown ids raise."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    await thread.run(chat(*[answer] * 4), {"messages": []})
    ids = [state["checkpoint_id"] for state in await thread.history()]
    assert len(ids) == 6

    async def found(**options: Any) -> list[str]:
        return [state["checkpoint_id"] for state in await thread.history(**options)]

    assert await found(limit=2) == ids[:2]
    assert await found(before=ids[1]) == ids[2:]
    assert await found(before=ids[1], limit=1) == ids[2:3]
    assert await found(checkpoint_id=ids[3]) == [ids[3]]
    assert await found(metadata={"source": "input"}) == ids[-1:]
    assert await found(metadata={"step": 2, "graph_id": "g"}) == [ids[2]]
    assert await found(metadata={"step": 99}) == []
    assert await found(before="nothing") == await found(checkpoint_id="a\0b") == []
    assert await stored.by_id(pool, OWNER, thread.id, "nothing") is None
    one = await stored.by_id(pool, OWNER, thread.id, ids[3])
    assert one is not None
    assert one["checkpoint_id"] == ids[3]


async def test_states_of_others_are_not_read(
    writer: FencedWriter, make_saver: MakeSaver, pool: Pool, start_run: StartRun
) -> None:
    """Breaks without the owner in the key."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    await thread.run(chat(answer), {"messages": []})
    for owner in (Owner(OWNER.tenant, "bob"), Owner("other", OWNER.user_id)):
        assert await stored.newest(pool, owner, thread.id) is None
        assert await stored.history(pool, owner, thread.id) == []


async def test_odd_values_and_names_are_kept(
    writer: FencedWriter,
    make_saver: MakeSaver,
    pool: Pool,
    start_run: StartRun,
    connection: AsyncConnection[Any],
) -> None:
    """Large values under a name with U+0000 too. Breaks if such a name goes into `refs`, which is searched by PostgreSQL."""
    thread = await new_thread(writer, make_saver, pool, start_run)
    values = {"a\0": LARGE, "b\ud800": "\ud800\0", "c": float("nan")}
    payload = {
        "config": {"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": "c"}},
        "parent_config": None,
        "values": values,
        "metadata": {"source": "loop", "step": 1, "odd": "\ud800"},
        "next": ["\0"],
        "tasks": [{"id": "1", "name": "n", "error": ValueError("\ud800"), "state": None}],
    }
    await thread.writer.write(thread.fence, payload_rows(str(thread.id), None, payload))
    state = await thread.newest()
    assert state["values"] == {"a\0": LARGE, "b\ufffd": "\ufffd\0", "c": None}
    assert state["tasks"][0]["error"] == {"error": "ValueError", "message": "\ufffd"}
    cursor = await connection.execute("select json_each_text(refs) from state_snapshots")
    await cursor.fetchall()
    (state,) = await thread.history(metadata={"odd": "\ufffd"})
    assert state["next"] == ["\0"]


def test_a_state_may_be_a_single_value() -> None:
    """As with LangGraph's functional API."""
    payload = {
        "config": {"configurable": {"thread_id": "t", "checkpoint_id": "c"}},
        "values": [1, 2],
        "metadata": {},
        "next": [],
        "tasks": [],
    }
    (row,) = payload_rows("t", None, payload)
    assert isinstance(row, SnapshotRow)
    assert row.values == b"[1,2]"
