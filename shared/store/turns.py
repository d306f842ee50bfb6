"""Work that a deployment does once in a while, whoever does it: many ask for the turn, one gets it.

A turn is no lock: when the work takes longer, another may begin it too, so it must be safe in many copies.
"""

from typing import Any, LiteralString

from psycopg import AsyncConnection

_GATHER_S = 0.02  # leases that were renewed together end together, but for the time that the renewal took

SWEEP_TURN: LiteralString = f"""
  update turns set due_at = least(
    clock_timestamp() + make_interval(secs => %(every_s)s),
    (select min(r.lease_expires_at) from runs r where r.status = 'running' and r.lease_expires_at > now())
      + make_interval(secs => {_GATHER_S}))
  where name = 'sweep' and due_at <= clock_timestamp() and %(wanted)s
  returning extract(epoch from due_at - clock_timestamp())::float8"""
"""Take the turn to sweep. It comes again ``every_s`` later, or as soon as the next lease ends: leases of executors that live
are renewed long before. Returns a row with the seconds until then if the turn is ours, else none; none if not ``wanted``."""


async def take_turn(connection: AsyncConnection[Any], name: str, every_s: float) -> bool:
    """Whether it is ours to do the work ``name`` now: nobody took this turn within the last ``every_s`` seconds."""
    cursor = await connection.execute(
        """update turns set due_at = clock_timestamp() + make_interval(secs => %s)
           where name = %s and due_at <= clock_timestamp() returning 1""",
        (every_s, name),
    )
    return await cursor.fetchone() is not None


async def take_sweep_turn(connection: AsyncConnection[Any], every_s: float) -> float | None:
    """Take the turn to sweep if it has come; returns the seconds until the next one is due, None if it is not ours."""
    cursor = await connection.execute(SWEEP_TURN, {"every_s": every_s, "wanted": True})
    row = await cursor.fetchone()
    return None if row is None else row[0]
