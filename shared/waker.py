"""Waking executors after a commit: a ring at once, and permits for the runs that nobody has taken a moment later.

A ring reaches whoever has a free slot within a millisecond, so a permit is for a run that has to wait. All of it may
fail without harm: executors look for ready runs on their own, only later.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from redis.asyncio import Redis

from sandfleet.shared.permits import Permits
from sandfleet.shared.rings import ring
from sandfleet.shared.store.ready import ReadyRuns

_log = logging.getLogger(__name__)
_HOLD_S = 0.2
"""How long permits are held back. An idle executor has claimed long before; a run that waits loses nothing by it."""

_TRACES = 10  # that permits carry at most: a batch of them

CountReady = Callable[[str, int], Awaitable[int]]
"""How many runs of a pool are ready and taken by nobody, counted up to a limit."""


class Waker:
    """Wakes executors of the pools that got ready runs. One per event loop.

    ``count_ready`` looks into PostgreSQL before permits are sent; with None each ready run gets its permit.
    """

    def __init__(self, redis: "Redis", permits: Permits, count_ready: CountReady | None = None) -> None:
        self._redis = redis
        self._permits = permits
        self._count_ready = count_ready
        self._rings: Counter[str] = Counter()
        self._sends: Counter[str] = Counter()
        self._traces: dict[str, deque[str]] = {}
        self._at_once = asyncio.Event()
        self._ringing: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None

    def wake(self, pool: str, count: int = 1, traceparent: str | None = None) -> None:
        """Note that ``count`` runs of a pool are ready, of the trace ``traceparent`` if it is one. Never blocks and never
        fails."""
        if count <= 0:
            return
        if traceparent is not None:
            self._traces.setdefault(pool, deque(maxlen=_TRACES)).append(traceparent)
        self._rings[pool] += count
        self._sends[pool] += count
        if self._ringing is None or self._ringing.done():
            self._ringing = asyncio.get_running_loop().create_task(self._ring())
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    def wake_all(self, ready: ReadyRuns) -> None:
        """Wake for all pools of a terminal transaction's report."""
        for pool, count in ready.items():
            self.wake(pool, count)

    async def flush(self) -> None:
        """Wait until all that was noted is sent or given up, without holding anything back. A Lambda does so before it
        answers: it is frozen after."""
        while tasks := [t for t in (self._ringing, self._sending) if t is not None and not t.done()]:
            self._at_once.set()
            await asyncio.wait(tasks)
        self._at_once.clear()

    async def _ring(self) -> None:
        while self._rings:
            rings, self._rings = dict(self._rings), Counter()
            try:
                await ring(self._redis, rings)
            except Exception as error:
                _log.warning("ring failed: %s", type(error).__name__)
                self._at_once.set()  # permits are all that is left

    async def _send(self) -> None:
        while self._sends:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HOLD_S):
                    await self._at_once.wait()
            self._at_once.clear()
            sends, self._sends = dict(self._sends), Counter()
            traces, self._traces = self._traces, {}
            for outcome in await asyncio.gather(
                *(
                    self._send_permits(pool, count, list(traces.get(pool, ())))
                    for pool, count in sends.items()
                ),
                return_exceptions=True,
            ):
                if isinstance(outcome, Exception):
                    _log.warning("permits not sent: %s", type(outcome).__name__)

    async def _send_permits(self, pool: str, count: int, traces: list[str]) -> None:
        if self._count_ready is not None and self._permits.has_queue(pool):
            with suppress(Exception):  # it cannot be asked: rather a permit too many
                count = await self._count_ready(pool, count)
        if count:
            await self._permits.send(pool, count, traces)
