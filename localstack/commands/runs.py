"""``sandfleet runs``: the newest runs."""

from pathlib import Path

from rich.table import Table

from sandfleet.localstack.connection import connect, recent_runs
from sandfleet.localstack.terminal import out


async def runs(root: Path, limit: int) -> int:
    """Print the newest runs of the caller as a table."""
    async with connect(root) as client:
        found = await recent_runs(client, limit)
        assistants = {a["assistant_id"]: a["name"] for a in await client.assistants.search(limit=1000)}
    table = Table(box=None, pad_edge=False)
    for title in ("run", "assistant", "status", "created"):
        table.add_column(title, no_wrap=True)
    for run in found:
        name = assistants.get(run["assistant_id"], run["assistant_id"])
        table.add_row(run["run_id"], name, run["status"], str(run["created_at"])[:19])
    out.print(table if found else "No runs yet. Start one: sandfleet run 'Say hi' --assistant hello")
    return 0
