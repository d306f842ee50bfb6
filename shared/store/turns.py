"""Work that a deployment does once in a while, whoever does it: many ask for the turn, one gets it."""

from typing import Any

from psycopg import AsyncConnection


async def take_turn(connection: AsyncConnection[Any], name: str, every_s: float) -> bool:
    """Whether it is ours to do the work ``name`` now: nobody took this turn within the last ``every_s`` seconds.

    A turn is no lock: when the work takes longer, another may begin it too, so it must be safe in many copies.
    """
    cursor = await connection.execute(
        """update turns set taken_at = clock_timestamp()
           where name = %s and taken_at <= clock_timestamp() - make_interval(secs => %s) returning 1""",
        (name, every_s),
    )
    return await cursor.fetchone() is not None
