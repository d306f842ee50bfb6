"""What an executor knows of its lease on a run, by a monotonic clock of its own."""

import asyncio
import time

from sandfleet.shared.errors import Superseded


class Lease:
    """The lease on one run. The control loop extends it; the graph's thread only reads it.

    ``deadline`` counts from before the renewal was sent, so it is never later than what the database holds. Plain
    attributes are enough between the two threads: each is written by one of them in a single step.
    """

    def __init__(self, deadline: float, claimed: float | None = None) -> None:
        """Both on the monotonic clock. ``claimed`` is when the claim's answer came (now if not given): the moment that
        stands for the run's ``claimed_at`` of the database's clock, and never earlier than that was."""
        self.claimed = time.monotonic() if claimed is None else claimed
        self.deadline = deadline
        self.superseded = False
        self.begun = False
        """The graphs' thread has taken the run up."""

    def in_doubt(self) -> bool:
        """Past its deadline: another executor may hold the run, so no new model, tool or sandbox call may start."""
        return self.superseded or time.monotonic() >= self.deadline

    async def certain(self) -> None:
        """Return once the lease is certain; at once when it is. Raises Superseded when it is lost.

        It polls, since callbacks of synchronous nodes run on event loops of their own.
        """
        while self.in_doubt():
            if self.superseded:
                raise Superseded("Another executor has taken this run over.")
            await asyncio.sleep(0.05)
