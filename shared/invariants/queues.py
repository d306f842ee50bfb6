"""The rule within SQS: a queue holds about as many permits as there are runs to execute."""

from sandfleet.shared.invariants import Violation
from sandfleet.shared.permits import Permits

SURPLUS = 100
"""Permits above the runs that are ready: what is in flight between a claim and the deletion of its permit, and what
SQS counts late. Each costs an executor one look that finds nothing; more than this means that something sends them."""


async def check_queues(permits: Permits, ready: dict[str, int]) -> tuple[list[Violation], int]:
    """Find queues with far more visible permits than ``ready`` runs of their pool; returns them and all permits."""
    violations = []
    count = 0
    for pool in permits.pools():
        visible = await permits.visible(pool)
        count += visible
        if visible > ready.get(pool, 0) + SURPLUS:
            violations.append(
                Violation(
                    "surplus permits",
                    pool,
                    f"{visible} permits are in the queue for {ready.get(pool, 0)} ready runs",
                )
            )
    return violations, count
