"""How one run is executed: what its end waits for, what it may pile up, and whose an error is."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Annotated, Any, LiteralString, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from sandfleet.fleet.executor import execution as execution_module
from sandfleet.fleet.executor.fenced_rows import CheckpointRow, SnapshotRow
from sandfleet.fleet.executor.fenced_writer import ExecutorStopped, FencedWriter
from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.fleet.executor.publisher import Publisher, RunStream
from sandfleet.fleet.executor.run_request import build_config
from sandfleet.fleet.sandbox.errors import OperationRefused, StaleAttempt
from sandfleet.fleet.sandbox.run_sandbox import current_sandbox
from sandfleet.shared.errors import Conflict, SandfleetError, Superseded, Unavailable
from sandfleet.shared.ids import Fence, Owner
from tests.executor.conftest import Executor, open_executor
from tests.streams.wire import open_wire
from tests.waiting import eventually


class State(TypedDict, total=False):
    done: Annotated[list[int], add]


def graph_of(node: Any, steps: int = 1) -> Any:
    """A graph that takes a node so many times."""
    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_conditional_edges("node", lambda s: "node" if len(s["done"]) < steps else END, ["node", END])
    return builder.compile()


async def step(state: State) -> State:
    return {"done": [len(state.get("done", [])) + 1]}


class SlowStates(FencedWriter):
    """Writes no state of a subgraph before ``gate`` is set; everything else at once."""

    def __init__(self, database_url: str) -> None:
        super().__init__(database_url)
        self.gate = asyncio.Event()
        self.waiting: set[asyncio.Task[None]] = set()

    def submit(self, who: Fence | Owner, rows: Sequence[Any]) -> "asyncio.Future[None]":
        if not any(isinstance(row, SnapshotRow) and row.ns for row in rows):
            return super().submit(who, rows)
        task = asyncio.ensure_future(self._later(who, rows))
        self.waiting.add(task)
        return task

    async def _later(self, who: Fence | Owner, rows: Sequence[Any]) -> None:
        await self.gate.wait()
        await super().submit(who, rows)

    async def drain(self) -> None:
        for task in self.waiting:
            await task
        self.waiting.clear()
        await super().drain()


async def test_the_end_of_a_run_waits_for_the_states_of_its_subgraphs(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red without the wait for what was written in passing: the end takes the fence away, and readers never see the last
    state.

    The states are let through when all events are out, the last thing that the end waits for before them.
    """
    writer = SlowStates(executor.world.database_url)
    await writer.start()
    executor.writer = writer
    drain, finish = RunStream.drain, Finisher.finish

    async def drained(stream: RunStream) -> None:
        await drain(stream)
        writer.gate.set()

    async def finishing(*arguments: Any) -> Any:
        unwritten.append(len(writer.waiting))
        return await finish(*arguments)

    unwritten: list[int] = []
    monkeypatch.setattr(RunStream, "drain", drained)
    monkeypatch.setattr(Finisher, "finish", finishing)
    execution = await executor.claim(graph_of(graph_of(step)), stream_mode=["updates"])
    await execution.execute()
    await writer.stop()
    assert unwritten == [0]
    assert await executor.stored(execution.run.fence.key) == ("success", None, 3 + 3)


async def number(executor: Executor, query: LiteralString) -> int:
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(query)
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def test_a_checkpoint_is_committed_with_the_state_that_readers_see(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the one is written before the other: who ends a run whose executor died in between, and has no graph to make
    the state with, would leave readers with one that is a checkpoint old."""
    submit = FencedWriter.submit
    together: list[set[str]] = []

    def noted(writer: FencedWriter, who: Fence | Owner, rows: Sequence[Any]) -> "asyncio.Future[None]":
        heads = [row for row in rows if isinstance(row, CheckpointRow | SnapshotRow) and not row.ns]
        if heads:
            together.append({f"{type(row).__name__} {row.checkpoint_id}" for row in heads})
        return submit(writer, who, rows)

    monkeypatch.setattr(FencedWriter, "submit", noted)
    await (await executor.claim(graph_of(step, steps=3))).execute()
    assert len(together) == 5
    assert {len(each) for each in together} == {2}
    assert {len({name.split()[1] for name in each}) for each in together} == {1}


async def test_no_step_begins_before_its_checkpoint_is_committed(executor: Executor) -> None:
    """Red when the graph goes on while its checkpoint is written: after a crash a step would be taken twice that was seen
    to end. LangGraph hands a checkpoint out before the tasks behind it begin; red, too, when it does not any more."""
    committed: list[int] = []

    async def node(state: State) -> State:
        committed.append(
            await number(
                executor,
                "select count(*) from checkpoints where run_id = (select run_id from runs order by seq desc limit 1)",
            )
        )
        return await step(state)

    await (await executor.claim(graph_of(node, steps=3))).execute()
    assert committed == [2, 3, 4], "the input's, the start's, and one for each step before"


@pytest.mark.parametrize(
    ("lost", "status"),
    [
        ("the run is broken off", "interrupted"),
        ("the state is not told", "error"),
        ("PostgreSQL cannot hold the state", "success"),
    ],
)
async def test_a_checkpoint_is_kept_without_its_state(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, lost: str, status: str
) -> None:
    """Red when what is held back for a state goes with it: the step would be taken again."""
    rows_of = execution_module.payload_rows

    def rows(*args: Any) -> list[Any]:
        found = rows_of(*args)
        if args[2]["next"]:
            return found
        if lost == "the run is broken off":
            execution.stop(execution_module.Stop.INTERRUPT)
            raise asyncio.CancelledError
        if lost == "the state is not told":
            raise RuntimeError("no rows can be made of it")
        return [row._replace(created_at="\0") if isinstance(row, SnapshotRow) else row for row in found]

    monkeypatch.setattr(execution_module, "payload_rows", rows)
    execution = await executor.claim(graph_of(step))
    await execution.execute()
    assert (
        await number(
            executor,
            "select count(*) from checkpoints where run_id = (select run_id from runs order by seq desc limit 1)",
        )
        == 3
    )
    assert (await executor.stored(execution.run.fence.key))[0] == status


@pytest.mark.parametrize("bound", [{"kept_events": 20}, {"kept_bytes": 2_000}], ids=["events", "bytes"])
async def test_a_graph_waits_when_its_events_cannot_be_kept(
    database: str, redis_url: str, tmp_path: Path, bound: dict[str, int]
) -> None:
    """Red without the wait in the loop over the graph's events: while PostgreSQL is away they would fill the memory."""
    taken = 0
    opened: list[RunStream] = []

    async def counted(state: State) -> State:
        nonlocal taken
        taken += 1
        if taken == 1:
            await opened[0].drain()
            await wire.cut()
        return {"done": [taken]}

    async with (
        open_wire(database) as (wire, wired_url),
        open_executor(database, redis_url, tmp_path, writer_url=wired_url) as executor,
    ):
        world = executor.world
        executor.publisher = Publisher(world.writer, world.redis, world.pool, world.settings, **bound)
        await executor.publisher.start()
        open_stream = executor.publisher.open

        def opening(fence: Fence, checkpoint_id: str | None) -> RunStream:
            opened.append(open_stream(fence, checkpoint_id))
            return opened[0]

        executor.publisher.open = opening  # type: ignore[method-assign]
        # No checkpoints in between, which would hold the graph up by themselves.
        execution = await executor.claim(
            graph_of(counted, steps=1000),
            stream_mode=["updates"],
            durability="exit",
            config={"recursion_limit": 2000},
        )
        running = asyncio.create_task(execution.execute())
        await eventually(lambda: taken > 1 and opened[0]._waiters, what="somebody waits for the events")
        waited_at = taken
        await wire.mend()
        await running
        assert waited_at < 200
        assert taken == 1000
        assert (await executor.stored(execution.run.fence.key))[0] == "success"
        assert len(await world.journal(execution.run.fence.key)) == 1 + 1000 + 1
        assert (opened[0]._kept_events, opened[0]._kept_bytes) == (0, 0)
        await executor.publisher.aclose()


async def test_the_graph_gets_the_callers_config(executor: Executor) -> None:
    """As LangGraph has it; ids are the server's. Red when one of them is accepted and forgotten on the way."""
    given: dict[str, Any] = {
        "tags": ["a"],
        "recursion_limit": 7,
        "max_concurrency": 3,
        "run_name": "mine",
        "configurable": {"tone": "dry", "user_id": "somebody else"},
    }
    execution = await executor.claim(graph_of(step), config=given)
    config = build_config(execution.run, execution._saver, [])
    assert {name: config[name] for name in given if name != "configurable"} == {  # type: ignore[literal-required]
        name: value for name, value in given.items() if name != "configurable"
    }
    assert config["configurable"]["tone"] == "dry"
    assert config["configurable"]["user_id"] == execution.run.fence.key.user_id
    run = replace(execution.run, metadata={"team": "red", "run_id": "another's"})
    # By this id LangGraph knows a checkpoint of the same run, and gives no input twice.
    assert build_config(run, execution._saver, [])["metadata"] == {
        "team": "red",
        "run_id": str(run.fence.key.run_id),
    }


async def sandbox_is_away(state: State) -> State:
    """As user code would: it uses the sandbox and handles nothing."""
    await current_sandbox.get().exec("true")
    return {"done": [1]}


async def refused(state: State) -> State:
    raise OperationRefused("is_a_directory", "/workspace is a directory")


@pytest.mark.parametrize(
    ("node", "error"),
    [
        (sandbox_is_away, {"error": "HostAway", "message": "No sandbox host answers"}),
        (refused, {"error": "OperationRefused", "message": "/workspace is a directory"}),
    ],
    ids=["no host", "refused"],
)
async def test_what_a_graph_does_not_handle_of_its_sandbox_is_its_error(
    executor: Executor, node: Any, error: dict[str, str]
) -> None:
    """Red when every error of our own classes is taken for ours: the run would be tried five times and called poison."""
    execution = await executor.claim(graph_of(node))
    await execution.execute()
    status, stored, _ = await executor.stored(execution.run.fence.key)
    assert (status, stored["error"]) == ("error", error["error"])
    assert stored["message"].startswith(error["message"])


@pytest.mark.parametrize(
    "error",
    [
        Superseded("Another attempt came first."),
        StaleAttempt("A later attempt has come."),
        ExecutorStopped("The executor stopped before this was written."),
    ],
    ids=["superseded", "superseded at the sandbox", "stopped"],
)
async def test_what_we_owe_a_graph_is_never_its_error(executor: Executor, error: Exception) -> None:
    """Red when the refusal of a superseded attempt, or of an executor that stops, ends the run as the graph's error; and when the
    execution does not count as stopped, so that nodes which swallow their cancellation are left to go on."""

    async def fails(state: State) -> State:
        raise error

    execution = await executor.claim(graph_of(fails))
    ended = await execution.execute()
    assert not ended.hand_over
    assert execution.stopped
    assert (await executor.stored(execution.run.fence.key))[:2] == ("running", None)


async def test_a_write_that_is_refused_for_good_ends_the_run(executor: Executor) -> None:
    """PostgreSQL has no U+0000 in texts. Red when it counts as a lost lease: each attempt would take the steps anew and be
    refused again, until the run is called poison and its graph a crashing one."""
    builder = StateGraph(State)
    builder.add_node("a\0b", step)
    builder.add_edge(START, "a\0b")
    execution = await executor.claim(builder.compile())
    await execution.execute()
    status, error, _ = await executor.stored(execution.run.fence.key)
    assert (status, error["error"]) == ("error", "RowRefused")


@pytest.mark.parametrize(
    "error", [Conflict("It is there."), Unavailable("It is not there."), SandfleetError("It is.")]
)
async def test_an_error_of_our_classes_is_the_graphs_own_if_it_raised_it(
    executor: Executor, error: SandfleetError
) -> None:
    """A graph may use the library, or a client of another deployment. Red when all but a sandbox's errors count as a lost
    lease."""

    async def fails(state: State) -> State:
        raise error

    execution = await executor.claim(graph_of(fails))
    await execution.execute()
    status, stored, _ = await executor.stored(execution.run.fence.key)
    assert (status, stored) == ("error", {"error": type(error).__name__, "message": error.message})
