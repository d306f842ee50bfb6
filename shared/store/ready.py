"""How the terminal transactions report which pools got ready runs when a thread or slot was passed on."""

from collections.abc import Iterable

ReadyRuns = dict[str, int]
"""Runs that became ready, by pool: as many executors should be woken."""


def ready_by_pool(rows: Iterable[tuple[str | None, int]]) -> ReadyRuns:
    """Gather the (pool, count) rows of a gate function; rows without a pool carry nothing."""
    ready: ReadyRuns = {}
    for pool, count in rows:
        if pool is not None:
            ready[pool] = ready.get(pool, 0) + count
    return ready
