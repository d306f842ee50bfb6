"""``sandfleet watch RUN``: the events of a run from its beginning, live until it ends."""

from pathlib import Path

from sandfleet.localstack.connection import connect, find_run
from sandfleet.localstack.event_printer import EventPrinter
from sandfleet.localstack.following import follow_run
from sandfleet.localstack.terminal import out


async def watch(root: Path, run_id: str) -> int:
    """Print the events of a run and, at its end, its status."""
    async with connect(root) as client:
        run = await find_run(client, run_id)
        await follow_run(client, run["thread_id"], run_id, EventPrinter(out))
        out.print(f"[dim]{(await client.runs.get(run['thread_id'], run_id))['status']}[/]")
    return 0
