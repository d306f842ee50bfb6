"""``python -m tests.tools.measure``: what the ledger adds to a tool call, in CPU and in time.

Agents of one `ToolNode` call a tool that does nothing, `--runs` of them at once, with and without the ledger, in turns.
CPU is that of this process (all its threads), without PostgreSQL's. Each figure is that of the least disturbed round.
"""

import argparse
import asyncio
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import uvloop
from langchain_core.messages import AIMessage, ToolCall
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from sandfleet.fleet.executor import intercept_tools
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.intercept_tools import LEDGER_KEY, current_ledger
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks
from sandfleet.fleet.executor.run_request import build_config
from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.fleet.executor.tool_ledger import ToolLedger
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence, RunKey, new_id
from sandfleet.shared.store.claims import ClaimedRun
from tests.fixtures_servers import TestServers, open_supervisor, start_servers


@tool
async def in_loop(line: str) -> str:
    """Do nothing."""
    return f"result of {line}"


@tool
def in_thread(line: str) -> str:
    """Do nothing."""
    return f"result of {line}"


def _graph(called: BaseTool, steps: int) -> Any:
    def plan(state: MessagesState) -> dict[str, Any]:
        call = ToolCall(name=called.name, args={"line": "x"}, id="call_1", type="tool_call")
        return {"messages": [AIMessage("", tool_calls=[call])]}

    def go_on(state: MessagesState) -> str:
        return "plan" if len(state["messages"]) < 2 * steps else END

    builder = StateGraph(MessagesState)
    builder.add_node("plan", plan)
    builder.add_node("tools", ToolNode([called]))
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "tools")
    builder.add_conditional_edges("tools", go_on, ["plan", END])
    return builder.compile()


class _Measure:
    def __init__(self, url: str, writer: FencedWriter, pool: Any, links: LedgerLinks) -> None:
        self._url, self._writer, self._pool, self._links = url, writer, pool, links

    async def round(self, graph: Any, runs: int, *, ledger: bool) -> tuple[float, float]:
        """CPU and wall seconds of ``runs`` runs at once."""
        claimed = [await self._run() for _ in range(runs)]
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self._execute(graph, run, ledger) for run in claimed))
        return time.process_time() - cpu, time.perf_counter() - wall

    async def _run(self) -> ClaimedRun:
        key, thread_id = RunKey("acme", "ann", new_id()), uuid.uuid4()
        async with self._pool.connection() as connection:
            await connection.execute(
                """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class,
                     status, attempt, multitask_strategy, timeout_s, kwargs, metadata)
                   values (%s, %s, %s, %s, %s, 'g', 'run', 'default', 1, 'running', 1, 'enqueue', 60, '{}', '{}')""",
                (*key, thread_id, uuid.uuid4()),
            )
        return ClaimedRun(
            Fence(key, 1),
            thread_id,
            uuid.uuid4(),
            "g",
            "run",
            1,
            0,
            {},
            {},
            None,
            datetime.now(UTC),
            60,
            60,
            False,
            None,
            datetime.now(UTC),
            None,
        )

    async def _execute(self, graph: Any, run: ClaimedRun, with_ledger: bool) -> None:
        saver = FencedSaver(self._writer, self._pool, run.fence.key.owner, run.fence, head_known_empty=True)
        config = build_config(run, saver, [])
        config["recursion_limit"] = 10_000
        if with_ledger:
            ledger = ToolLedger(run, Lease(time.monotonic() + 3600), saver.serde, self._links)
            config["configurable"][LEDGER_KEY] = ledger
            current_ledger.set(ledger)
        await graph.ainvoke({"messages": []}, config, durability="sync")


async def _measure(options: argparse.Namespace) -> None:
    supervisor = await open_supervisor("measure")
    try:
        servers = TestServers(supervisor, await start_servers(supervisor, env={}))
        await servers.create_template()
        url = await servers.create_database()
        async with open_pool(url, 8) as pool:
            writer = FencedWriter(url)
            await writer.start()
            links = LedgerLinks(url, writer, pool)
            measure = _Measure(url, writer, pool, links)
            intercept_tools.install()
            for called in (in_loop, in_thread):
                graph = _graph(called, options.steps)
                for runs in (1, options.runs):
                    cpu: dict[bool, list[float]] = {False: [], True: []}
                    wall: dict[bool, list[float]] = {False: [], True: []}
                    await measure.round(graph, runs, ledger=True)
                    for _ in range(options.rounds):
                        for with_ledger in (False, True):
                            spent = await measure.round(graph, runs, ledger=with_ledger)
                            cpu[with_ledger].append(spent[0] * 1000 / (runs * options.steps))
                            wall[with_ledger].append(spent[1] * 1000 / options.steps)
                    without, with_it = (min(cpu[x]) for x in (False, True))
                    waited, waits = (min(wall[x]) for x in (False, True))
                    print(
                        f"{called.name:10} {runs:3} at once: CPU per step {without:.2f} -> {with_it:.2f} ms"
                        f" (+{with_it - without:.2f}), time per step {waited:.2f} -> {waits:.2f} ms (+{waits - waited:.2f})"
                    )
            await links.aclose()
            await writer.stop()
        await servers.drop_database(url)
    finally:
        await supervisor.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="runs at once")
    parser.add_argument("--steps", type=int, default=20, help="tool calls of each")
    parser.add_argument("--rounds", type=int, default=5)
    uvloop.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
