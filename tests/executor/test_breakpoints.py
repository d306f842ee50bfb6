"""Breakpoints hold until another run goes on, also where the executor is lost between the graph's stop and the run's end."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from sandfleet.fleet.executor.execution import Execution
from sandfleet.shared.errors import Superseded
from tests.executor.conftest import Executor
from tests.executor.test_execution import State
from tests.waiting import eventually

Where = dict[str, list[str]]

BEFORE, AFTER = {"interrupt_before": ["b"]}, {"interrupt_after": ["a"]}


def chain(node: Callable[[str, State], Any], **where: Any) -> Any:
    """A graph of the steps a, b, c."""
    builder = StateGraph(State)
    for name in ("a", "b", "c"):

        async def step(state: State, name: str = name) -> State:
            await node(name, state)
            return {}

        builder.add_node(name, step)
    for start, end in ((START, "a"), ("a", "b"), ("b", "c"), ("c", END)):
        builder.add_edge(start, end)
    return builder.compile(**where)


def around(inner: Any) -> Any:
    """A graph whose only step is another graph."""
    return StateGraph(State).add_node("inner", inner).add_edge(START, "inner").compile()


def spread(inner: Any, times: int) -> Any:
    """A graph that gives each number its own copy of another graph, side by side."""
    builder = StateGraph(State).add_node("inner", inner)
    builder.add_conditional_edges(START, lambda _: [Send("inner", {"done": [n]}) for n in range(times)])
    return builder.compile()


SHAPES: dict[str, Callable[[Any, Where], Any]] = {
    "the run's own": lambda node, where: chain(node, **where),
    "in a node": lambda node, where: around(chain(node, **where)),
    "in a node, kept for the thread": lambda node, where: around(chain(node, **where, checkpointer=True)),
    "in a node, with a checkpointer": lambda node, where: around(
        chain(node, **where, checkpointer=InMemorySaver())
    ),
    "in a node, keeping nothing": lambda node, where: around(chain(node, **where, checkpointer=False)),
    "in a node of a node": lambda node, where: around(around(chain(node, **where))),
    "side by side": lambda node, where: spread(chain(node, **where), 2),
}


def lose_at_the_end(execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor is gone when the graph has stopped."""

    async def lost(_: Any) -> None:
        raise Superseded("The executor is lost here.")

    monkeypatch.setattr(execution, "_succeeded", lost)


async def statuses(executor: Executor, execution: Execution) -> Any:
    """Of the run and of its thread."""
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            "select r.status, t.status from runs r join threads t using (tenant, user_id, thread_id) where run_id = %s",
            (execution.run.fence.key.run_id,),
        )
        return await cursor.fetchone()


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("where", [AFTER, BEFORE], ids=str)
async def test_a_breakpoint_holds_though_the_executor_is_lost_there(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, where: Where, durability: str
) -> None:
    """Until another run goes on. Red when the next attempt goes on from the checkpoint as if it had been asked to: what waits
    for somebody's approval would be done without. Red, too, when a run that does go on stops there once more."""
    begun: list[str] = []

    async def note(name: str, _: State) -> None:
        begun.append(name)

    graph = chain(note)
    first = await executor.claim(graph, durability=durability, **where)
    lose_at_the_end(first, monkeypatch)
    await first.execute()
    stopped = list(begun)
    assert "b" not in stopped
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert begun == stopped
    assert await statuses(executor, second) == ("success", "interrupted")
    resumed = await executor.claim(graph, thread_id=first.run.thread_id, input=None)
    await resumed.execute()
    assert begun == ["a", "b", "c"]


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("where", [AFTER, BEFORE], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_breakpoint_of_a_compiled_graph_holds_wherever_it_is(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, shape: str, where: Where, durability: str
) -> None:
    """Red when the next attempt looks only at the run's own graph, or at only one graph in a node, or takes a graph that keeps
    its state under another name for one that is not there."""
    begun: list[str] = []

    async def note(name: str, _: State) -> None:
        begun.append(name)

    graph = SHAPES[shape](note, where)
    first = await executor.claim(graph, durability=durability)
    lose_at_the_end(first, monkeypatch)
    await first.execute()
    assert set(begun) == {"a"}
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert set(begun) == {"a"}
    assert await statuses(executor, second) == ("success", "interrupted")
    if shape == "in a node, keeping nothing":  # it begins anew each time, and stops each time
        return
    resumed = await executor.claim(graph, thread_id=first.run.thread_id, input=None, durability=durability)
    await resumed.execute()
    copies = 2 if shape == "side by side" else 1
    assert sorted(begun) == sorted("abc" * copies)
    assert await statuses(executor, resumed) == ("success", "idle")


@pytest.mark.parametrize("durability", ["sync", "exit"])
async def test_the_next_breakpoint_of_a_graph_in_a_node_holds_for_who_goes_on(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """A run that is to go on from one writes nothing to its own graph until the node ends. Red when it is asked for that graph's
    checkpoint whether an earlier attempt came to a breakpoint: the second would be passed by who was asked for the first."""
    begun: list[str] = []

    async def note(name: str, _: State) -> None:
        begun.append(name)

    graph = around(chain(note, interrupt_before=["b", "c"]))
    asked = await executor.claim(graph, durability=durability)
    await asked.execute()
    assert begun == ["a"]
    first = await executor.claim(graph, thread_id=asked.run.thread_id, input=None, durability=durability)
    lose_at_the_end(first, monkeypatch)
    await first.execute()
    assert begun == ["a", "b"]
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert begun == ["a", "b"]
    assert await statuses(executor, second) == ("success", "interrupted")
    resumed = await executor.claim(graph, thread_id=asked.run.thread_id, input=None, durability=durability)
    await resumed.execute()
    assert begun == ["a", "b", "c"]


@pytest.mark.parametrize("durability", ["sync", "exit"])
async def test_a_breakpoint_behind_the_last_step_of_a_graph_in_a_node_holds(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """What comes behind the node waits. Red when a graph that has no next step is taken for one that is over."""
    begun: list[str] = []

    async def note(name: str, _: State) -> None:
        begun.append(name)

    async def behind(_: State) -> State:
        begun.append("behind")
        return {}

    builder = StateGraph(State).add_node("inner", chain(note, interrupt_after=["c"])).add_node(behind)
    graph = builder.add_edge(START, "inner").add_edge("inner", "behind").compile()
    first = await executor.claim(graph, durability=durability)
    lose_at_the_end(first, monkeypatch)
    await first.execute()
    assert begun == ["a", "b", "c"]
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert "behind" not in begun
    assert await statuses(executor, second) == ("success", "interrupted")
    resumed = await executor.claim(graph, thread_id=first.run.thread_id, input=None, durability=durability)
    await resumed.execute()
    assert begun[-1] == "behind"


@pytest.mark.parametrize("where", [AFTER, BEFORE], ids=str)
async def test_graphs_beside_one_at_a_breakpoint_go_on(executor: Executor, where: Where) -> None:
    """To their own, whoever takes over. Red when the attempt ends at once since one of them stands: who goes on would be asked
    again for each of the others; and when all begin: the one that stands would go on."""
    begun: list[tuple[str, int]] = []
    at_work, lost = asyncio.Event(), asyncio.Event()

    async def note(name: str, state: State) -> None:
        begun.append((name, state["done"][0]))
        if state["done"] == [1] and not lost.is_set():
            at_work.set()
            await lost.wait()
            raise Superseded("The executor is lost here.")

    graph = spread(chain(note, **where), 2)
    first = await executor.claim(graph)
    running = asyncio.create_task(first.execute())
    await at_work.wait()

    async def stands() -> bool:
        async with executor.world.pool.connection() as connection:
            cursor = await connection.execute(
                "select 1 from checkpoints where run_id = %s and ns <> '' and metadata->>'source' = 'loop' and metadata->>'step' = '1'",
                (first.run.fence.key.run_id,),
            )
            return await cursor.fetchone() is not None

    await eventually(stands, what="one of the graphs is behind its first step")
    lost.set()
    await running
    assert sorted(begun) == [("a", 0), ("a", 1)]
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert sorted(begun) == [("a", 0), ("a", 1), ("a", 1)]
    assert await statuses(executor, second) == ("success", "interrupted")
    resumed = await executor.claim(graph, thread_id=first.run.thread_id, input=None)
    await resumed.execute()
    assert sorted(begun)[3:] == [("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    assert await statuses(executor, resumed) == ("success", "idle")
