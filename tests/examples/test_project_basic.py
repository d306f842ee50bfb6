"""The graphs that other tests run: each does what its module says when LangGraph alone runs it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from sandfleet.loadtest.provider.server import Provider

Load = Callable[[str, str], ModuleType]
BASIC = "tests/projects/basic"


async def test_counter_takes_every_step_once(load: Load) -> None:
    counter = load(BASIC, "counter")
    state = await counter.graph.ainvoke({"steps": 7})
    assert state["done"] == [1, 2, 3, 4, 5, 6, 7]
    assert state["digest"] == counter.expected_digest(7)


async def test_counter_fails_at_the_step_asked_for(load: Load) -> None:
    with pytest.raises(RuntimeError, match="step 3"):
        await load(BASIC, "counter").graph.ainvoke({"steps": 5, "fail_at": 3})


async def test_approve_returns_what_it_is_resumed_with(load: Load) -> None:
    graph = load(BASIC, "approve").builder.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    asked = await graph.ainvoke({"question": "Sure?"}, config)
    assert asked["__interrupt__"][0].value == {"question": "Sure?"}
    assert await graph.ainvoke(Command(resume=False), config) == {
        "question": "Sure?",
        "asked": 1,
        "answer": False,
    }


async def test_fails_raises_its_message(load: Load) -> None:
    with pytest.raises(ValueError, match="as told"):
        await load(BASIC, "fails").graph.ainvoke({"message": "as told"})


async def test_slow_emits_a_tick_per_piece(load: Load) -> None:
    graph = load(BASIC, "slow").graph
    events = [e async for e in graph.astream({"seconds": 0.05, "piece_ms": 10}, stream_mode="custom")]
    assert events == [{"tick": tick} for tick in range(5)]


async def test_parent_streams_its_subgraph_under_its_name(load: Load) -> None:
    graph = load(BASIC, "parent").graph
    seen = [(ns, u) async for ns, u in graph.astream({"value": 3}, stream_mode="updates", subgraphs=True)]
    assert [(ns[0].split(":")[0] if ns else "", u) for ns, u in seen] == [
        ("", {"before": {"value": 4}}),
        ("nested", {"double": {"value": 8}}),
        ("", {"nested": {"value": 8}}),
        ("", {"after": {"value": 9}}),
    ]


async def test_blocking_blocks_and_returns(load: Load, tmp_path: Path) -> None:
    over = tmp_path / "over"
    over.touch()
    assert (await load(BASIC, "blocking").graph.ainvoke({"until": str(over)}))["blocked"]


async def test_factory_makes_a_graph_per_config(load: Load) -> None:
    make = load(BASIC, "factory").make_graph
    graphs = [make({"configurable": {"name": name}}) for name in ("Ada", "Ben")]
    assert [await graph.ainvoke({}) for graph in graphs] == [
        {"greeting": "Hello Ada", "builds": 1},
        {"greeting": "Hello Ben", "builds": 2},
    ]


async def test_messages_answers_through_the_provider(provider: Provider, load: Load) -> None:
    state = await load(BASIC, "messages").graph.ainvoke({"messages": [("user", "hello")]})
    assert [message.type for message in state["messages"]] == ["human", "ai"]


@pytest.mark.parametrize("kind", ["nul", "surrogate", "nan", "huge_int", "bytes", "deep", "all"])
async def test_odd_values_come_through_langgraph_unchanged(load: Load, kind: str) -> None:
    assert (await load(BASIC, "odd").graph.ainvoke({"kind": kind}))["intact"]


def test_own_shared_imports_its_own_packages_and_reads_its_environment_file() -> None:
    project = Path(__file__).parents[1] / "projects" / "own_shared"
    name, _, value = (project / ".env").read_text().strip().partition("=")
    code = "from graph import graph; print(graph.invoke({'name': 'Ada'})['shouted'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env={**os.environ, name: value.strip('"')},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "GOOD DAY, ADA\n"
