"""kill -9 at each named point of a tool call, 20 runs at a time: no effect happens twice, and none is lost unmarked.

The process dies when all of them have come to the point, so the checkpoint that would hold the results is written for none
of them: what the ledger says is all that the successor knows.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.stack import Stack
from tests.fixtures_stack import start_stack
from tests.waiting import eventually

RUNS = 20
IN_THREADS = 2  # synchronous tools hold a thread each while they wait, and the graphs' loop has few
AGENTS = 9
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the stack's fault points look."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
async def stack(engine: str, points: Path) -> AsyncIterator[Stack]:
    """A stack with one executor that can be killed at a point."""
    started = await start_stack(engine, "tools", SANDFLEET_FAULT_POINTS=str(points))
    yield started
    assert await started.stop() == []


@pytest.fixture(scope="module")
async def client(stack: Stack) -> AsyncIterator[LangGraphClient]:
    async with get_client(url=stack.info.api_url, api_key=stack.info.api_key) as client:
        yield client


def given(number: int, path: Path) -> dict[str, Any]:
    """What to create run ``number`` with. Step 1 calls twice and step 2 once, all with the tool call id `call_1`."""
    first, second = ["a", "b"], ["c"]
    if number < RUNS - AGENTS:
        tool = "append_in_thread" if number < IN_THREADS else "append"
        calls = [[{"tool": tool, "line": line} for line in step] for step in (first, second)]
        return {"assistant_id": "effects", "input": {"path": str(path), "calls": calls}}
    turns: list[Any] = [
        {"tool_calls": [{"name": "append", "args": {"line": line}, "id": "call_1"} for line in step]}
        for step in (first, second)
    ]
    script = json.dumps({"turns": [*turns, {"text": "done"}]})
    return {
        "assistant_id": "agent_effects",
        "input": {"messages": [{"role": "user", "content": f"#script:{script}"}]},
        "config": {"configurable": {"path": str(path)}},
    }


def answers(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool messages of a run, in order."""
    return [m for m in values["messages"] if m["type"] == "tool"]


@pytest.mark.parametrize("point", ["tool.before_ledger", "tool.started", "tool.effect_done", "tool.recorded"])
async def test_a_line_is_appended_at_most_once_and_doubt_is_marked(
    stack: Stack, client: LangGraphClient, points: Path, tmp_path: Path, point: str
) -> None:
    """Red when the ledger is written after the effect, not read by the successor, or a call's identity leaves out its
    message, its place or its task."""
    (points / point).write_text(f"kill {2 * RUNS}")
    paths = [tmp_path / f"lines-{number}" for number in range(RUNS)]
    threads = [await client.threads.create() for _ in paths]
    runs = await asyncio.gather(
        *(
            client.runs.create(thread["thread_id"], **given(number, path))
            for number, (thread, path) in enumerate(zip(threads, paths, strict=True))
        )
    )
    executor = stack.supervisor.processes["executor-1"]
    await eventually(lambda: executor.pid is None, PATIENCE_S, f"the executor's death at {point}")
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:
        # What the sweep does when the lease has run out, without the wait.
        await connection.execute(
            """update runs set status = 'pending', lease_owner = null, lease_expires_at = null, deaths = deaths + 1
               where status = 'running'"""
        )
    await stack.restart("executor-1")

    outcomes = await asyncio.gather(
        *(client.runs.join(t["thread_id"], r["run_id"]) for t, r in zip(threads, runs, strict=True))
    )
    for thread, run, path, values in zip(threads, runs, paths, outcomes, strict=True):
        assert (await client.runs.get(thread["thread_id"], run["run_id"]))["status"] == "success"
        lines = Counter(path.read_text().split()) if path.exists() else Counter()
        first, second, third = answers(values)
        assert max(lines.values()) == 1, "an effect happened twice"
        assert lines["c"] == 1
        assert third["content"] == "appended c"
        if point in ("tool.before_ledger", "tool.recorded"):
            assert (lines["a"], lines["b"]) == (1, 1)
            assert [first["content"], second["content"]] == ["appended a", "appended b"]
        else:
            assert (lines["a"], lines["b"]) == ((0, 0) if point == "tool.started" else (1, 1))
            for answer in (first, second):
                assert answer["status"] == "error"
                assert "may or may not have taken effect" in answer["content"]
        calls = await client.http.get(f"/threads/{thread['thread_id']}/runs/{run['run_id']}/tool_calls")
        assert all(c["message_id"] and c["tool_call_id"] == "call_1" for c in calls)
        doubtful = point in ("tool.started", "tool.effect_done")
        assert sorted(c["status"] for c in calls) == ["finished"] * (1 if doubtful else 3) + ["orphaned"] * (
            2 if doubtful else 0
        )
