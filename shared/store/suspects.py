"""Suspects: runs that have lost so many executors in a row, without a new checkpoint, that one more death ends them.

Each of them has killed its executors, or was beside one that did. Which of both shows when it runs alone.
"""

from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.store.turns import take_turn

TURN = "suspects"
"""Name of the turn that says who starts a process for them."""

_EVERY_S = 5.0  # longer than the start of such a process: one that is on its way takes what waits


def deaths_of_a_suspect(poison_limit: int) -> int:
    """How many deaths make a run a suspect."""
    return max(poison_limit - 1, 1)


async def suspects_wait(connection: AsyncConnection[Any], pool: str, poison_limit: int) -> bool:
    """Whether suspects are ready, and it is our turn to start a process for them. ``connection`` is in autocommit mode."""
    cursor = await connection.execute(
        """select exists (select 1 from runs where status = 'pending' and gate is null and pool = %s
             and deaths > 0 and deaths >= %s)""",
        (pool, deaths_of_a_suspect(poison_limit)),
    )
    row = await cursor.fetchone()
    return row is not None and row[0] and await take_turn(connection, TURN, _EVERY_S)
