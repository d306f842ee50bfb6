"""``sandfleet dev``: keep a stack up until Ctrl-C."""

import asyncio
from pathlib import Path

from sandfleet.fleet.graphs.project import read_project
from sandfleet.localstack.connection import DEFAULT_ASSISTANT
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import Steps, out


async def dev(root: Path, project: Path, executors: int, port: int) -> int:
    """Start the stack, print how to reach it, and stop it on a signal. Dead processes are restarted."""
    stack = Stack(root, project, executors=executors, restart=True, say=Steps(), port=port)
    try:
        info = await stack.start()
        graphs = list(read_project(stack.project).graphs)
        out.print(f"\n[bold]sandfleet is ready[/]  {info.api_url}")
        out.print(f"API key and addresses: {stack.dev_json}")
        out.print(f"Logs:                  {stack.supervisor.logs}")
        out.print(f"Graphs:                {', '.join(graphs)}  (of {stack.project})")
        out.print(f"Try:                   {_something_to_try(graphs)}")
        out.print("Ctrl-C stops everything.")
        await asyncio.Event().wait()
    finally:
        began = stack.supervisor.holds_folder
        for thing in await stack.stop():
            out.print(f"Removed by force: {thing}")
        if began:
            out.print("Stopped.")
    return 0


def _something_to_try(graphs: list[str]) -> str:
    if DEFAULT_ASSISTANT in graphs:
        return "sandfleet run 'Compute the 30th prime'"
    named = "" if len(graphs) == 1 else f" --assistant {graphs[0]}"
    return f"sandfleet run 'Say hi'{named}  (--input '{{…}}' for a graph without messages)"
