"""``sandfleet demo``: one real task from start to end, and proof that nothing stays behind."""

import asyncio
import time
from pathlib import Path

import psycopg

from sandfleet.localstack import docker_api
from sandfleet.localstack.connection import client_of
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.event_printer import EventPrinter
from sandfleet.localstack.following import asked, run_assistant
from sandfleet.localstack.leftovers import LABEL, processes_of
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import Steps, out
from sandfleet.localstack.timing_table import print_timing

TASK = "Which numbers below 100 are prime? Find out with a program."
_SANDBOX_GONE_S = 60.0


async def demo(root: Path, project: Path) -> int:
    """Run `TASK` on the assistant ``coder``. 0 only if everything checked is as it should be."""
    steps = Steps()
    problems: list[str] = []
    stack = Stack(root, project, say=steps)
    names: list[str] = []
    try:
        info = await stack.start()
        out.print(f"\n[bold]task[/]     {TASK}")
        printer = EventPrinter(out)
        seen: set[str] = set()
        watching = asyncio.create_task(_watch_sandboxes(info, seen))
        async with client_of(info) as client:
            thread_id, run_id = await run_assistant(client, "coder", printer, input=asked(TASK))
            run = await client.runs.get(thread_id, run_id)
        watching.cancel()
        problems += _judge(printer, run["status"])
        out.print(f"\n[bold]answer[/]   {printer.answer}", markup=True, highlight=False)
        await print_timing(info, run_id)
        problems += await _judge_database(info, run_id)
        problems += await _judge_sandboxes(info)
        names = sorted(stack.info.processes)
    finally:
        removed = await stack.stop()
    problems += [f"had to be removed by force: {thing}" for thing in removed]
    problems += [f"still running: {p.name()} ({p.pid})" for p in processes_of(stack.supervisor.instance)]
    if seen:
        out.print(f"[bold]cleaned up[/]  removed with the run: {', '.join(sorted(seen))}")
    out.print(f"[bold]cleaned up[/]  processes stopped: {', '.join(names)}")
    for problem in problems:
        out.print(f"[bold red]problem[/]  {problem}", highlight=False)
    if not problems:
        steps("Everything is as it should be: run success, tool events complete, nothing left behind")
    return 1 if problems else 0


def _judge(printer: EventPrinter, status: str) -> list[str]:
    problems = []
    if status != "success" or printer.error:
        problems.append(f"the run ended {status} {printer.error or ''}".strip())
    if not printer.started:
        problems.append("no tool was called")
    problems += [f"tool call {call} began and never ended" for call in printer.missing()]
    if not printer.answer:
        problems.append("the model gave no answer")
    return problems


async def _judge_database(info: StackInfo, run_id: str) -> list[str]:
    async with await psycopg.AsyncConnection.connect(info.database_url) as connection:
        row = await (
            await connection.execute("select status, lease_owner from runs where run_id = %s", (run_id,))
        ).fetchone()
    out.print(f"[bold]PostgreSQL[/]  run {run_id}: {row[0] if row else 'not there'}")
    if row is None or row[0] != "success":
        return [f"PostgreSQL has the run as {row[0] if row else 'missing'}"]
    return [] if row[1] is None else ["PostgreSQL still has a lease on the run"]


async def _watch_sandboxes(info: StackInfo, seen: set[str]) -> None:
    """Note the containers and networks that the run gets, until cancelled."""
    while info.docker_host is not None:
        seen.update(
            await asyncio.to_thread(docker_api.labelled, info.docker_host, f"{LABEL}={info.instance}")
        )
        await asyncio.sleep(0.1)


async def _judge_sandboxes(info: StackInfo) -> list[str]:
    """Nothing of the run may be left on the engine, at the latest `_SANDBOX_GONE_S` after its end."""
    if info.docker_host is None:
        return []
    deadline = time.monotonic() + _SANDBOX_GONE_S
    label = f"{LABEL}={info.instance}"
    while left := await asyncio.to_thread(docker_api.labelled, info.docker_host, label):
        if time.monotonic() > deadline:
            return [f"still there {_SANDBOX_GONE_S:.0f} s after the run: {thing}" for thing in left]
        await asyncio.sleep(0.05)
    return []
