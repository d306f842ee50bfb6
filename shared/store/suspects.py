"""Suspects: runs that have lost so many executors in a row, without a new checkpoint, that one more death ends them.

Each of them has killed its executors, or was beside one that did. Which of both shows when it runs alone, in a process
whose end another one sees. A lease that ran out shows less: whoever held it may have been frozen, or starved.
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


def deaths_that_end(poison_limit: int) -> int:
    """How many deaths end a run that nobody has seen to kill its executor."""
    return poison_limit if poison_limit == 1 else 2 * poison_limit


async def suspects_wait(connection: AsyncConnection[Any], pool: str, poison_limit: int) -> bool:
    """Whether suspects are ready, and it is our turn to start a process for them. ``connection`` is in autocommit mode."""
    cursor = await connection.execute(
        """select exists (select 1 from runs where status = 'pending' and gate is null and pool = %s
             and deaths > 0 and deaths >= %s)""",
        (pool, deaths_of_a_suspect(poison_limit)),
    )
    row = await cursor.fetchone()
    return row is not None and row[0] and await take_turn(connection, TURN, _EVERY_S)


async def killed(connection: AsyncConnection[Any], owner: str, poison_limit: int) -> int:
    """Note that the suspect which ``owner`` ran has killed it: the sweep ends it at once. What had written a checkpoint
    there was no suspect any more. Returns how many there were, which is one at most."""
    cursor = await connection.execute(
        """update runs r set deaths = %s, lease_expires_at = clock_timestamp()
           where r.status = 'running' and r.lease_owner = %s and r.deaths > 0 and r.deaths >= %s and not exists (
             select 1 from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id
             and c.thread_id = r.thread_id::text and c.run_id = r.run_id and c.attempt = r.attempt)""",
        (deaths_that_end(poison_limit), owner, deaths_of_a_suspect(poison_limit)),
    )
    return cursor.rowcount
