"""The timing of a run as a table."""

from datetime import datetime

import httpx
from rich.table import Table

from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.terminal import out


async def print_timing(info: StackInfo, run_id: str) -> None:
    """Fetch ``GET /runs/{id}/timing`` and print the times, relative to the first, and the latencies in ms."""
    async with httpx.AsyncClient(base_url=info.api_url, headers={"x-api-key": info.api_key}) as client:
        timing = (await client.get(f"/runs/{run_id}/timing")).raise_for_status().json()
    table = Table(title="timing", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("ms", justify="right")
    times = {key: value for key, value in timing.items() if key.endswith("_at")}
    begin = datetime.fromisoformat(times["created_at"])
    for key, value in times.items():
        after = None if value is None else (datetime.fromisoformat(value) - begin).total_seconds() * 1000
        table.add_row(key, "–" if after is None else f"+{after:.1f}")
    for key, value in timing["latencies"].items():
        table.add_row(key, "–" if value is None else f"{value:.1f}", style="bold")
    out.print(table)
