"""``sandfleet dev``: keep a stack up until Ctrl-C."""

import asyncio
from pathlib import Path

from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import Steps, out


async def dev(root: Path, project: Path, executors: int, port: int) -> int:
    """Start the stack, print how to reach it, and stop it on a signal. Dead processes are restarted."""
    stack = Stack(root, project, executors=executors, restart=True, say=Steps(), port=port)
    try:
        info = await stack.start()
        out.print(f"\n[bold]sandfleet is ready[/]  {info.api_url}")
        out.print(f"API key and addresses: {stack.dev_json}")
        out.print(f"Logs:                  {stack.supervisor.logs}")
        out.print("Try:                   sandfleet run 'Compute the 30th prime'")
        out.print("Ctrl-C stops everything.")
        await asyncio.Event().wait()
    finally:
        removed = await stack.stop()
        for thing in removed:
            out.print(f"Removed by force: {thing}")
        out.print("Stopped.")
    return 0
