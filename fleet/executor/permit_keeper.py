"""Holding permits for running runs: received, kept invisible, and deleted as runs end.

A permit does not belong to one run: at most as many are held as runs are executed here. One that finds no run is surplus.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandfleet.shared.permits import Permits

_log = logging.getLogger(__name__)
_PAUSE_AFTER_ERROR_S = 1.0
_GATHER_S = 0.05  # deletes wait this long for others to share a call; a slot stays free this long before it asks for one
_REPLACE_AFTER_S = 11 * 3600.0  # SQS ends a receipt 12 hours after it was received, whatever extends it


@dataclass(frozen=True, slots=True)
class _Held:
    handle: str
    received: float = field(default_factory=time.monotonic)


class PermitKeeper:
    """The permits of one executor. Lives on the control loop."""

    def __init__(
        self,
        permits: Permits,
        pool: str,
        *,
        slots: int,
        long_poll_s: int,
        visibility_s: int,
        busy: Callable[[], int],
        ready: Callable[[], Awaitable[None]],
        on_poll: Callable[[], None],
    ) -> None:
        """``busy`` says how many runs are executed here, ``ready`` returns when more may be taken, and ``on_poll`` is
        called after each poll."""
        self._permits = permits
        self._pool = pool
        self._slots = slots
        self._long_poll_s = long_poll_s
        self._visibility_s = visibility_s
        self._busy = busy
        self._ready = ready
        self._on_poll = on_poll
        self._held: list[_Held] = []
        self._room = asyncio.Event()
        self._settling: asyncio.Task[None] | None = None

    async def receive(self) -> None:
        """Long-poll for permits for ever while a slot is free. Each poll that ends, with or without permits, calls
        ``on_poll``: with every message lost, a ready run waits one poll at most."""
        while True:
            wanted = self._wanted()
            if wanted <= 0:
                self._room.clear()
                await self._room.wait()
                await asyncio.sleep(_GATHER_S)  # under load the next run takes it long before
                continue
            await self._ready()
            try:
                handles = await self._permits.receive(
                    self._pool, wanted, self._long_poll_s, self._visibility_s
                )
                # All slots may have been taken during the poll, and others may have a free one.
                if handles and self._busy() >= self._slots:
                    await self._pass_on(handles)
                    continue
            except Exception as error:
                _log.warning("receiving permits failed: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                handles = []
            self._held += [_Held(handle) for handle in handles]
            self._on_poll()

    def _wanted(self) -> int:
        return self._slots - max(self._busy(), len(self._held))

    async def extend(self) -> None:
        """Keep held permits invisible, well before they would come back; replace those whose receipt ends soon."""
        while True:
            await asyncio.sleep(self._visibility_s / 3)
            old = [p for p in self._held if time.monotonic() - p.received > _REPLACE_AFTER_S]
            self._held = [p for p in self._held if p not in old]
            try:
                if old:
                    await self._permits.send(self._pool, len(old))
                    await self._permits.delete(self._pool, [p.handle for p in old])
                if self._held:
                    await self._permits.extend(self._pool, [p.handle for p in self._held], self._visibility_s)
            except Exception as error:
                _log.warning("extending permits failed: %s", type(error).__name__)

    def settle_soon(self) -> None:
        """Note that runs have begun or ended."""
        if self._wanted() > 0:
            self._room.set()
        if self._held and (self._settling is None or self._settling.done()):
            self._settling = asyncio.get_running_loop().create_task(self._settle())

    async def _settle(self) -> None:
        """Delete the permits that no running run stands for, in batches."""
        await asyncio.sleep(_GATHER_S)
        while (surplus := len(self._held) - self._busy()) > 0:
            gone, self._held = self._held[:surplus], self._held[surplus:]
            self._room.set()
            try:
                await self._permits.delete(self._pool, [p.handle for p in gone])
            except Exception as error:  # they come back and are found to be surplus
                _log.warning("deleting permits failed: %s", type(error).__name__)

    async def give_back(self) -> None:
        """Let others have the permits that no running run stands for, at once."""
        surplus = len(self._held) - self._busy()
        if surplus <= 0:
            return
        gone, self._held = self._held[:surplus], self._held[surplus:]
        try:
            await self._pass_on([p.handle for p in gone])
        except Exception as error:  # they come back when their visibility timeout is over
            _log.warning("giving permits back failed: %s", type(error).__name__)

    async def _pass_on(self, handles: list[str]) -> None:
        """Send fresh permits for these: made visible again, they would count a death of an executor each time."""
        await self._permits.send(self._pool, len(handles))
        await self._permits.delete(self._pool, handles)

    async def release(self) -> None:
        """Delete all permits: no run is executed here any more, and those that were handed over have fresh ones."""
        if self._settling is not None:
            await asyncio.wait([self._settling])
        gone, self._held = self._held, []
        if gone:
            await self._permits.delete(self._pool, [p.handle for p in gone])
