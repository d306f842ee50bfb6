"""What the saver adds to what LangGraph asks of a checkpointer: order, storage, owners, odd values, threads."""

import asyncio
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict, cast

import langgraph.checkpoint.base.id as checkpoint_ids
import pytest
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.conformance.test_utils import generate_checkpoint, generate_metadata
from langgraph.graph import END, START, StateGraph
from psycopg import AsyncConnection

from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.saver import INLINE_BYTES, FencedSaver
from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.store import threads
from tests.checkpoints.conftest import OWNER, MakeSaver, StartRun, count
from tests.streams.wire import open_wire


def joined(old: list[Any], new: list[Any]) -> list[Any]:
    return old + new


class State(TypedDict, total=False):
    xs: Annotated[list[Any], joined]
    files: Any


def steps(saver: FencedSaver | None, *nodes: Callable[..., Any]) -> Any:
    """A graph that runs these nodes one after the other."""
    builder: Any = StateGraph(State)
    before = START
    for n, node in enumerate(nodes):
        builder.add_node(f"n{n}", node)
        builder.add_edge(before, f"n{n}")
        before = f"n{n}"
    builder.add_edge(before, END)
    return builder.compile(checkpointer=saver)


def at(thread_id: str, ns: str = "", **more: Any) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns, **more}}


LARGE = "x" * (INLINE_BYTES + 1)


# --- what a task leaves --------------------------------------------------------------------------------------------


async def test_a_task_that_was_broken_off_leaves_nothing(make_saver: MakeSaver) -> None:
    """A run is cancelled, or handed over, after its node has written and before the edge behind it is chosen. Breaks if
    the part is kept: who goes on takes the node for done, meets no edge, and ends without the second node."""
    choosing, chosen = asyncio.Event(), asyncio.Event()

    async def choose(_: State) -> str:
        choosing.set()
        await chosen.wait()
        return "second"

    builder: Any = StateGraph(State)
    builder.add_node("first", lambda _: {"xs": ["first"]})
    builder.add_node("second", lambda _: {"xs": ["second"]})
    builder.add_edge(START, "first")
    builder.add_conditional_edges("first", choose, ["second"])
    graph = builder.compile(checkpointer=make_saver())

    async def stream() -> None:
        async for _ in graph.astream({"xs": []}, at("broken-off"), subgraphs=True):  # as the executor does
            pass

    work = asyncio.create_task(stream())
    await choosing.wait()
    work.cancel()
    await asyncio.wait({work})
    chosen.set()
    state = await graph.aget_state(at("broken-off"))
    assert (state.next, state.tasks[0].error) == (("first",), None)
    assert (await graph.ainvoke(None, at("broken-off")))["xs"] == ["first", "second"]


# --- order ---------------------------------------------------------------------------------------------------------


async def test_a_host_whose_clock_is_ahead_loses_no_turn(
    make_saver: MakeSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn ran on a host 60 s ahead, the others on right ones. Breaks if the newest checkpoint is the one with
    the highest id: the third turn would go on from the first, without the second."""

    async def turn(text: str, ahead_s: int) -> Any:
        clock = SimpleNamespace(time_ns=lambda: time.time_ns() + ahead_s * 1_000_000_000)
        monkeypatch.setattr(checkpoint_ids, "time", clock)
        monkeypatch.setattr(checkpoint_ids, "_last_v6_timestamp", None)
        graph = steps(make_saver(), lambda _: {"xs": ["answer"]})
        return await graph.ainvoke({"xs": [text]}, at("skew"))

    await turn("one", 60)
    await turn("two", 0)
    assert (await turn("three", 0))["xs"] == ["one", "answer", "two", "answer", "three", "answer"]


async def test_history_follows_the_database_too(make_saver: MakeSaver) -> None:
    """Also `before`. Breaks if either goes by ids: the later checkpoint has the lower one."""
    saver = make_saver()
    ids = ["3", "1", "2"]
    for each in ids:
        await saver.aput(at("ids"), generate_checkpoint(checkpoint_id=each), generate_metadata(), {})
    assert [t.checkpoint["id"] async for t in saver.alist(at("ids"))] == ["2", "1", "3"]
    before = at("ids", checkpoint_id="1")
    assert [t.checkpoint["id"] async for t in saver.alist(at("ids"), before=before)] == ["3"]


# --- storage -------------------------------------------------------------------------------------------------------


async def test_unchanged_large_values_are_written_once(
    make_saver: MakeSaver, connection: AsyncConnection[Any]
) -> None:
    """30 steps beside half a megabyte of files write the files once and 32 small checkpoints. Breaks if they are inline,
    or if their version is not recognised: 16 MB."""
    files = {"f": os.urandom(250_000).hex()}

    def step(state: State) -> State:
        return {"xs": ["x" * 200]}

    await steps(make_saver(), *([step] * 30)).ainvoke({"xs": [], "files": files}, at("amplified"))
    cursor = await connection.execute(
        "select count(*), sum(length(body) + length(metadata::text)) from checkpoints where thread_id = 'amplified'"
    )
    ((checkpoints, size),) = await cursor.fetchall()
    assert checkpoints == 32
    assert size < 500_000
    assert await count(connection, "checkpoint_blobs", thread_id="amplified", channel="files") == 1
    state = await steps(make_saver(), *([step] * 30)).aget_state(at("amplified"))
    assert state.values["files"] == files


async def test_unchanged_large_values_are_not_written_again_by_the_next_run(
    make_saver: MakeSaver, connection: AsyncConnection[Any]
) -> None:
    """Breaks if what was read is not remembered for what is written next."""
    for _ in range(3):
        graph = steps(make_saver(), lambda _: {"xs": ["a"]})
        given = {"xs": [], "files": LARGE} if _ == 0 else {"xs": []}
        result = await graph.ainvoke(given, at("turns"))
    assert result["files"] == LARGE
    assert await count(connection, "checkpoint_blobs", thread_id="turns", channel="files") == 1


async def test_unchanged_values_are_not_serialized_again(make_saver: MakeSaver) -> None:
    """Breaks without comparing versions with the parent checkpoint."""
    times = 0

    class Counted:
        def _asdict(self) -> dict[str, Any]:
            nonlocal times
            times += 1
            return {}

    graph = steps(make_saver(), *([lambda _: {"xs": ["a"]}] * 5))
    await graph.ainvoke({"xs": [], "files": Counted()}, at("counted"))
    assert times == 3  # as the input, as its write to the channel, and as the channel's value


async def test_branches_keep_their_own_large_values(make_saver: MakeSaver) -> None:
    """Two children of one checkpoint give the same version to different values. Breaks if values are stored by version
    alone: the second branch would read the first one's."""
    saver = make_saver()
    parent = await saver.aput(at("fork"), generate_checkpoint(), generate_metadata(), {})
    branches = {}
    for letter in "ab":
        checkpoint = generate_checkpoint(channel_values={"v": letter * 20_000}, channel_versions={"v": 1})
        branches[letter] = await saver.aput(parent, checkpoint, generate_metadata(), {"v": 1})
    for letter, config in branches.items():
        child = generate_checkpoint(channel_values={"v": letter * 20_000}, channel_versions={"v": 1})
        stored = await saver.aput(config, child, generate_metadata(), {})
        for reader in (saver, make_saver()):
            found = await reader.aget_tuple(stored)
            assert found is not None
            assert found.checkpoint["channel_values"]["v"] == letter * 20_000


async def test_values_are_kept_as_they_were_at_the_call(writer: FencedWriter, make_saver: MakeSaver) -> None:
    """Graphs change their values in place. Breaks if the saver or the writer serializes when it writes."""
    saver = make_saver()
    values: dict[str, Any] = {"small": [1], "large": [LARGE]}
    checkpoint = generate_checkpoint(channel_values=values, channel_versions={"small": 1, "large": 1})
    put = asyncio.create_task(
        saver.aput(at("mutable"), checkpoint, generate_metadata(), {"small": 1, "large": 1})
    )
    await asyncio.sleep(0)  # the saver has been called, nothing is written yet
    values["small"].append(2)
    values["large"].append("more")
    found = await make_saver().aget_tuple(await put)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"small": [1], "large": [LARGE]}


async def test_a_lost_value_is_an_error(make_saver: MakeSaver, connection: AsyncConnection[Any]) -> None:
    """Breaks if a missing value is left out: the run would go on without it."""
    await steps(make_saver(), lambda _: {}).ainvoke({"xs": [], "files": LARGE}, at("lost"))
    await connection.execute("delete from checkpoint_blobs where thread_id = 'lost'")
    with pytest.raises(SandfleetError, match="lost"):
        await make_saver().aget_tuple(at("lost"))


async def test_values_that_nothing_names_any_more_are_deleted(
    make_saver: MakeSaver, connection: AsyncConnection[Any]
) -> None:
    """When checkpoints are thinned out; what the newest one names stays. Breaks without either half of that."""
    graph = steps(make_saver(), lambda _: {"files": LARGE + "2"}, lambda _: {"files": LARGE + "3"})
    await graph.ainvoke({"xs": [], "files": LARGE + "1"}, at("thin"))
    assert await count(connection, "checkpoint_blobs", thread_id="thin", channel="files") == 3
    await make_saver().aprune(["thin"])
    assert await count(connection, "checkpoints", thread_id="thin") == 1
    assert await count(connection, "checkpoint_writes", thread_id="thin") == 0
    assert (await graph.aget_state(at("thin"))).values["files"] == LARGE + "3"
    assert await count(connection, "checkpoint_blobs", thread_id="thin") == 1


async def test_channels_of_differences_survive_thinning_out(make_saver: MakeSaver) -> None:
    """They are rebuilt from the writes of ancestors. Breaks if only the newest checkpoint is kept."""

    class Differences(TypedDict):
        xs: Annotated[list[str], DeltaChannel(lambda old, new: [*old, *(x for xs in new for x in xs)])]

    builder = StateGraph(Differences)
    builder.add_node("n", lambda _: {"xs": ["answer"]})
    builder.add_edge(START, "n")
    for turn in ("one", "two"):
        await builder.compile(checkpointer=make_saver()).ainvoke({"xs": [turn]}, at("delta"))
    await make_saver().aprune(["delta"])
    state = await builder.compile(checkpointer=make_saver()).aget_state(at("delta"))
    assert state.values["xs"] == ["one", "answer", "two", "answer"]


# --- an empty thread -----------------------------------------------------------------------------------------------


async def test_a_new_thread_asks_nothing_of_the_database(writer: FencedWriter, start_run: StartRun) -> None:
    """Its whole run works without a pool, subgraphs too. Breaks if the first read, or that of a namespace nobody has
    written to, is asked."""
    fence = await start_run()
    saver = FencedSaver(writer, cast(Any, None), OWNER, fence, head_known_empty=True)
    inner = steps(None, lambda _: {"xs": ["inner"]})
    graph = steps(saver, inner)
    assert await graph.ainvoke({"xs": ["in"]}, at("new")) == {"xs": ["in", "in", "inner"]}


async def test_only_the_runs_own_thread_is_known_to_be_empty(make_saver: MakeSaver) -> None:
    """A node may read another thread of its user. Breaks if the knowledge is not kept by thread."""
    await steps(make_saver(), lambda _: {}).ainvoke({"xs": ["kept"]}, at("other"))
    saver = make_saver(head_known_empty=True)
    assert await saver.aget_tuple(at("fresh")) is None
    assert await saver.aget_tuple(at("other")) is not None
    await steps(saver, lambda _: {}).ainvoke({"xs": ["mine"]}, at("fresh"))
    found = await saver.aget_tuple(at("fresh"))
    assert found is not None
    assert found.checkpoint["channel_values"]["xs"] == ["mine"]


# --- owners --------------------------------------------------------------------------------------------------------


async def test_owners_do_not_meet(make_saver: MakeSaver) -> None:
    """The same thread id of another user, and of another tenant, is another thread, in every operation."""
    owners = [Owner("one", "ann"), Owner("one", "bob"), Owner("two", "ann")]
    savers = [make_saver(owner=owner) for owner in owners]
    for n, saver in enumerate(savers):
        await steps(saver, lambda _: {}).ainvoke({"xs": [n], "files": LARGE}, at("shared"))
    await savers[1].acopy_thread("shared", "copy")
    await savers[2].adelete_thread("shared")
    await savers[0].aprune(["shared"])
    for n, saver in enumerate(savers[:2]):
        found = await make_saver(owner=owners[n]).aget_tuple(at("shared"))
        assert found is not None
        assert found.checkpoint["channel_values"]["xs"] == [n]
        assert len([t async for t in saver.alist(None)]) == (1 if n == 0 else 6)
    assert await make_saver(owner=owners[2]).aget_tuple(at("shared")) is None
    assert await make_saver(owner=owners[0]).aget_tuple(at("copy")) is None


async def test_a_copied_thread_goes_on_from_all_its_values(make_saver: MakeSaver, pool: Pool) -> None:
    """Also from those that are stored apart. Breaks if a copy through the API forgets a column of the checkpoints."""
    source, target = new_id(), new_id()
    async with pool.connection() as connection:
        await connection.execute(
            "insert into threads (tenant, user_id, thread_id) values (%s, %s, %s)", (*OWNER, source)
        )
    graph = steps(make_saver(), lambda _: {"files": LARGE}, lambda _: {"xs": ["done"]})
    before = await graph.ainvoke({"xs": []}, at(str(source)))
    await threads.copy(pool, OWNER, source, target)
    copied = steps(make_saver(), lambda _: {}, lambda _: {})
    state = await copied.aget_state(at(str(target)))
    assert state.values == before
    assert (await copied.ainvoke({"xs": ["again"]}, at(str(target))))["files"] == LARGE


# --- odd values ----------------------------------------------------------------------------------------------------


async def test_odd_values_never_end_a_run(make_saver: MakeSaver) -> None:
    """U+0000, lone surrogates, NaN, huge integers and deep nesting, from a node and inside a message. Breaks without the
    tolerant serializer (TypeError) and with `jsonb` (U+0000)."""
    deep: list[Any] = []
    for _ in range(1_000):
        deep = [deep]
    message = AIMessage("a\0b", tool_calls=[{"name": "t", "args": {"n": 2**70}, "id": "c"}])
    odd = ["a\0b", "a\ud800b", float("inf"), 2**70, -(10**400), b"\x00\xff", message]
    config: RunnableConfig = {
        **at("odd"),
        "metadata": {"note": "\ud800", "n": 2**70, "x": float("nan"), "z": "\0"},
    }
    graph = steps(make_saver(), lambda _: {"xs": odd, "files": deep})
    await graph.ainvoke({"xs": ["\0"]}, config)
    found = await make_saver().aget_tuple(at("odd"))
    assert found is not None
    xs = found.checkpoint["channel_values"]["xs"]
    assert xs[:2] == ["\0", "a\0b"]
    assert xs[3:5] == [float("inf"), 2.0**70]
    assert xs[6] == b"\x00\xff"
    assert xs[7].content == "a\0b"
    assert xs[7].tool_calls[0]["args"] == {"n": 2.0**70}
    assert found.metadata.get("x", 0) is None
    assert [t.metadata["step"] async for t in make_saver().alist(at("odd"), filter={"step": 0})] == [0]


async def test_metadata_is_compared_though_it_holds_what_jsonb_refuses(make_saver: MakeSaver) -> None:
    """Breaks if the comparison is left to PostgreSQL: it raises on the first U+0000, and the paging must go on past what
    does not match."""
    saver = make_saver()
    for n in range(120):
        metadata = generate_metadata(step=n, nested={"nul": "a\0b", "n": n % 60})
        await saver.aput(at("filter"), generate_checkpoint(), metadata, {})
    found = [t.metadata["step"] async for t in saver.alist(at("filter"), filter={"nested": {"n": 7}})]
    assert found == [67, 7]
    assert [
        t.metadata["step"] async for t in saver.alist(at("filter"), filter={"nested": {"n": 7}}, limit=1)
    ] == [67]
    assert cast(Any, (await anext(saver.alist(at("filter")))).metadata)["nested"]["nul"] == "a\0b"


async def test_ids_that_text_cannot_hold_are_not_found(make_saver: MakeSaver) -> None:
    """A checkpoint id may come from a client. Breaks without the check: psycopg raises DataError."""
    assert await make_saver().aget_tuple(at("t", checkpoint_id="a\0b")) is None


# --- threads -------------------------------------------------------------------------------------------------------


async def test_plain_nodes_may_read_the_state(make_saver: MakeSaver) -> None:
    """They run in worker threads, and call the forms that are not async. Breaks if those are not carried to the loop."""
    saver = make_saver()
    seen: list[Any] = []

    def node(_: State, config: RunnableConfig) -> State:
        state = steps(saver, lambda _: {}).get_state(at("sync"))
        seen.append((state.values["xs"], len(list(saver.list(at("sync"), limit=5)))))
        return {}

    await steps(saver, node).ainvoke({"xs": ["in"]}, at("sync"), durability="sync")
    assert seen == [(["in"], 2)]


async def test_every_plain_method_works_from_a_thread(make_saver: MakeSaver) -> None:
    """Whole graphs run so, too."""
    saver = make_saver()

    def work() -> None:
        steps(saver, lambda _: {"xs": ["b"]}).invoke({"xs": ["a"]}, at("plain"))
        saver.copy_thread("plain", "plain2")
        saver.prune(["plain2"])
        assert len(list(saver.list(at("plain2")))) == 1
        saver.delete_thread("plain")
        assert saver.get_tuple(at("plain")) is None
        saver.delete_for_runs(["none"])
        assert saver.get_delta_channel_history(config=at("plain2"), channels=["xs"])["xs"]["writes"] == []

    await asyncio.to_thread(work)


async def test_a_plain_call_on_the_event_loop_is_refused(make_saver: MakeSaver) -> None:
    """Breaks without the check: it would wait for itself for ever."""
    with pytest.raises(SandfleetError, match="aget_state"):
        make_saver().get_tuple(at("t"))


# --- outages -------------------------------------------------------------------------------------------------------


async def test_a_graph_waits_for_a_database_that_is_away(database: str, writer: FencedWriter) -> None:
    """Reads are a pause, as writes are. Red when the pool's own patience becomes the graph's error."""
    async with open_wire(database) as (wire, through), open_pool(through, 2) as pool:
        graph = steps(FencedSaver(writer, pool, OWNER, None), lambda _: {"xs": ["done"]})
        await graph.ainvoke({"xs": ["one"]}, at("away"))
        pool.timeout = 0.1
        await wire.cut()
        turn = asyncio.create_task(graph.ainvoke({"xs": ["two"]}, at("away")))
        done, _ = await asyncio.wait([turn], timeout=1.0)
        assert not done
        await wire.mend()
        assert (await turn)["xs"] == ["one", "done", "two", "done"]
