"""Executors that serve some of a project's graphs, each kind in a pool of its own: `SANDFLEET_GRAPHS`."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sandfleet.fleet.graphs.project import Project
from sandfleet.shared.errors import GraphLoadError
from tests.waiting import eventually

PROJECT = Project(graphs={"a": "./a.py:graph", "b": "./b.py:graph", "c": "./c.py:graph"})
GRAPH = """
from typing import TypedDict
from langgraph.graph import END, START, StateGraph

class State(TypedDict, total=False):
    x: int

graph = StateGraph(State).add_node("n", lambda s: {"x": 1}).add_edge(START, "n").add_edge("n", END).compile()
"""


def test_only_those_that_are_named_are_served() -> None:
    """Red when others are kept, or all are dropped when none is named."""
    assert PROJECT.only(["a", "c"]).graphs == {"a": "./a.py:graph", "c": "./c.py:graph"}
    assert PROJECT.only([]).graphs == PROJECT.graphs


def test_a_graph_that_the_project_does_not_have_is_named() -> None:
    """Red when a typing error leaves an executor without the graph, and its runs without an executor."""
    with pytest.raises(GraphLoadError, match=r"SANDFLEET_GRAPHS names 'x', but langgraph\.json has a, b, c"):
        PROJECT.only(["a", "x"])


@pytest.fixture
async def connection(database: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        yield connection


async def test_executors_serve_their_own_graphs_in_their_own_pool(
    connection: psycopg.AsyncConnection[Any], database: str, redis_url: str, tmp_path: Path
) -> None:
    """The other graph's module cannot even be imported here, as in an image without its packages. Red when an executor loads
    or offers a graph that is not its own: runs would go to whoever registered it last."""
    (tmp_path / "mine.py").write_text(GRAPH)
    (tmp_path / "theirs.py").write_text("import a_package_that_is_not_here")
    graphs = {"mine": "./mine.py:graph", "theirs": "./theirs.py:graph"}
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": graphs}))
    await connection.execute(
        "insert into graphs (graph_id, pool, schemas, drawings) values ('theirs', 'hosts', '{}', '{}')"
    )
    env = {
        "DATABASE_URL": database,
        "REDIS_URL": redis_url,
        "SANDFLEET_PROJECT": str(tmp_path / "langgraph.json"),
        "SANDFLEET_GRAPHS": '["mine"]',
        "SANDFLEET_POOL": "default",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sandfleet.fleet.executor",
        env={**os.environ, **env},
        stdout=asyncio.subprocess.DEVNULL,
    )

    async def registered() -> bool:
        assert process.returncode is None, "the executor has ended"
        found = await connection.execute("select graph_id, pool from graphs")
        return sorted(await found.fetchall()) == [("mine", "default"), ("theirs", "hosts")]

    try:
        await eventually(registered, 120, "the graph")
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
