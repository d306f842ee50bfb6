"""``sandfleet usage``: calls, tokens and costs of models, as they stand in PostgreSQL."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from psycopg import AsyncConnection
from rich.table import Table

from sandfleet.localstack.deployment_check import find_deployment
from sandfleet.localstack.terminal import out
from sandfleet.shared.store.usage import By, Used, in_days

_ROWS = 10_000


async def usage(root: Path, first: datetime | None, last: datetime | None, by: By, tenant: str | None) -> int:
    """Print what a tenant, or all of them, have used from the first to the last day; the last 30 days by default."""
    to = last.date() if last else datetime.now(UTC).date()
    since = first.date() if first else to - timedelta(29)
    settings, _, _ = find_deployment(root)
    async with await AsyncConnection.connect(settings.database_url, autocommit=True) as connection:
        found = await in_days(connection, tenant, since, to, by, limit=_ROWS)
    table = Table(box=None, pad_edge=False)
    table.add_column(by, min_width=10, overflow="fold")
    for title in ("calls", "unmetered", "unpriced", "input", "cached", "output", "US$"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, used in found.by_name:
        table.add_row(name or "–", *_cells(used))
    table.add_row("total", *_cells(found.total), style="bold")
    out.print(table if found.by_name else f"No model calls from {since} to {to}.")
    return 0


def _cells(used: Used) -> list[str]:
    counts = (
        used.calls,
        used.unmetered_calls,
        used.unpriced_calls,
        used.input_tokens,
        used.cache_read_tokens,
        used.output_tokens,
    )
    return [*(f"{count:,}" for count in counts), "–" if used.cost_usd is None else f"{used.cost_usd:,.4f}"]
