"""What PostgreSQL wants of an executor: asked once a second by one statement, however much the executor has to do."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.turns import SWEEP_TURN


class Orders(NamedTuple):
    """``cancels``: which of the executor's runs were asked to end, and how. ``next_sweep_s``: it is the executor's turn to
    sweep, and the turn after that comes in so many seconds; None if it is not."""

    cancels: dict[Fence, str]
    next_sweep_s: float | None


_ORDERS = f"""
  with turn (next_s) as ({SWEEP_TURN})
  select null, null, null, null, null, next_s from turn
  union all
  select r.tenant, r.user_id, r.run_id, r.attempt, r.cancel_action, null
  from runs r join unnest(%(tenants)s::text[], %(users)s::text[], %(runs)s::uuid[], %(attempts)s::int[])
    f (tenant, user_id, run_id, attempt)
    on r.tenant = f.tenant and r.user_id = f.user_id and r.run_id = f.run_id and r.attempt = f.attempt
  where r.cancel_action is not null"""


async def orders(
    connection: AsyncConnection[Any], fences: Sequence[Fence], *, sweep_every_s: float, may_sweep: bool
) -> Orders:
    """The orders of the executor that holds ``fences``. With ``may_sweep`` it takes the turn if that has come."""
    cursor = await connection.execute(
        _ORDERS,
        {
            "tenants": [f.key.tenant for f in fences],
            "users": [f.key.user_id for f in fences],
            "runs": [f.key.run_id for f in fences],
            "attempts": [f.attempt for f in fences],
            "every_s": sweep_every_s,
            "wanted": may_sweep,
        },
    )
    cancels: dict[Fence, str] = {}
    next_sweep_s = None
    for *key, attempt, action, next_s in await cursor.fetchall():
        if next_s is None:
            cancels[Fence(RunKey(*key), attempt)] = action
        else:
            next_sweep_s = next_s
    return Orders(cancels, next_sweep_s)
