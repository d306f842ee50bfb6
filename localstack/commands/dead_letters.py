"""``sandfleet dead-letters``: permits that were put aside, and sending them anew."""

from pathlib import Path

from psycopg import AsyncConnection
from rich.table import Table

from sandfleet.localstack.deployment_check import find_deployment
from sandfleet.localstack.terminal import out
from sandfleet.shared.dead_letters import LOOK_S, dead_permits, pool_state, redrive
from sandfleet.shared.permits import Permits


async def dead_letters(root: Path, anew: bool, limit: int) -> int:
    """Print the dead permits of each pool beside what PostgreSQL says of it; with ``anew``, send them again."""
    settings, _, _ = find_deployment(root)
    permits = Permits(settings)
    try:
        found = await dead_permits(permits, limit)
        if not found:
            out.print(f"No dead permits but those that were listed in the last {LOOK_S} s.")
            return 0
        table = Table(box=None, pad_edge=False)
        for title in ("pool", "message", "sent", "received"):
            table.add_column(title, no_wrap=True)
        for permit in found:
            sent = permit.sent_at.isoformat(timespec="seconds")
            table.add_row(permit.pool, permit.message_id, sent, str(permit.receives))
        out.print(table)
        async with await AsyncConnection.connect(settings.database_url, autocommit=True) as connection:
            for pool in sorted({permit.pool for permit in found}):
                state = await pool_state(connection, pool)
                out.print(
                    f"{pool}: {state.ready} ready runs, the oldest for {state.oldest_ready_s:.0f} s; {state.running} running; "
                    f"{state.executors} executors alive; most deaths of a run in a row: {state.most_deaths}"
                )
        if anew:
            left = await redrive(permits, found)
            out.print(f"Sent {len(found)} anew.")
            if left:
                out.print(f"{left} of them could not be removed: they are listed again.")
        else:
            out.print(
                "No run waits for these: PostgreSQL finds ready runs. Look why executors died; --redrive sends them anew."
            )
    finally:
        await permits.aclose()
    return 0
