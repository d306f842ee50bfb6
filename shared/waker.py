"""Waking executors after a commit: a ring at once, permits gathered into batches. Both may fail without harm."""

import asyncio
import logging
from collections import Counter

from redis.asyncio import Redis

from sandfleet.shared.permits import Permits
from sandfleet.shared.rings import ring
from sandfleet.shared.store.ready import ReadyRuns

_log = logging.getLogger(__name__)
_GATHER_S = 0.02  # a batch of ten costs an SQS call as much as one permit


class Waker:
    """Wakes executors of the pools that got ready runs. One per event loop."""

    def __init__(self, redis: "Redis", permits: Permits) -> None:
        self._redis = redis
        self._permits = permits
        self._rings: Counter[str] = Counter()
        self._sends: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def wake(self, pool: str, count: int = 1) -> None:
        """Note that ``count`` runs of a pool are ready. Never blocks and never fails."""
        if count > 0:
            self._rings[pool] += count
            self._sends[pool] += count
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._work())

    def wake_all(self, ready: ReadyRuns) -> None:
        """Wake for all pools of a terminal transaction's report."""
        for pool, count in ready.items():
            self.wake(pool, count)

    async def flush(self) -> None:
        """Wait until all that was noted is sent or given up. A Lambda does so before it answers: it is frozen after."""
        while self._task is not None and not self._task.done():
            await asyncio.shield(self._task)

    async def _work(self) -> None:
        while self._rings or self._sends:
            if self._rings:
                rings, self._rings = dict(self._rings), Counter()
                try:
                    await ring(self._redis, rings)
                except Exception as error:
                    _log.warning("ring failed: %s", type(error).__name__)
                continue
            await asyncio.sleep(_GATHER_S)
            if self._rings:
                continue
            sends, self._sends = dict(self._sends), Counter()
            try:
                await asyncio.gather(*(self._permits.send(pool, count) for pool, count in sends.items()))
            except Exception as error:
                _log.warning("permits not sent: %s", type(error).__name__)
