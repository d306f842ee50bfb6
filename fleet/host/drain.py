"""How a host that stops gives up its sandboxes: those that are idle at once, those in use when a grace is over; workspaces are kept."""

import asyncio
import logging
from contextlib import suppress

from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_RELEASE_EVERY_S = 1.0
_WHY = "The sandbox was lost: its host has stopped."


class Drain:
    """Of one host, once: `run`, then `finish`. ``save_s``: how long the latter may take to keep what is left."""

    def __init__(self, registry: Registry, save_s: float) -> None:
        self._registry = registry
        self._save_s = save_s
        self._ending: dict[RunKey, asyncio.Task[None]] = {}
        self._failed: set[RunKey] = set()

    async def run(self, grace_s: float) -> None:
        """Take nothing new, and end each sandbox in which nothing is under way. Returns when nothing goes on, or ``grace_s`` are
        over. Without a bucket nothing is ended early: its files would be gone, and its run may yet end by itself."""
        registry = self._registry
        registry.draining = True
        registry.room_made.set()  # so that PostgreSQL hears of it soon
        releasing = asyncio.create_task(self._release(), name="release runs whose sandbox has ended")
        try:
            await asyncio.gather(registry.warm.close(), self._wait(grace_s))
        finally:
            releasing.cancel()

    async def _release(self) -> None:
        """For ever: let runs without a sandbox here, whenever and however it ended, go on elsewhere."""
        while True:
            await self._registry.snapshots.release(self._registry.keys())
            await asyncio.sleep(_RELEASE_EVERY_S)

    async def _wait(self, at_most_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while self._goes_on():  # noqa: ASYNC110 - they tell nobody
                    await asyncio.sleep(_LOOK_S)

    def _goes_on(self) -> bool:
        """Begin to end what is idle; whether there is anything else than what could not be ended."""
        goes_on = self._registry.creating
        for key, sandbox in self._registry.held():
            if not sandbox.busy and self._registry.snapshots.kept and key not in self._failed:
                if key not in self._ending:
                    self._ending[key] = asyncio.create_task(self._end(key, sandbox), name=f"end {sandbox.id}")
                goes_on = True
        return goes_on or any(sandbox.busy for _, sandbox in self._registry.held())

    async def _end(self, key: RunKey, sandbox: Sandbox) -> None:
        try:
            await self._registry.end(key, sandbox, sandbox.asked, _WHY)
        except SandfleetError as error:
            logger.warning("workspace not kept", extra={"run_id": str(key.run_id), "reason": error.code})
            self._failed.add(key)
        finally:
            del self._ending[key]

    async def finish(self) -> None:
        """Keep the workspaces of what is left, in use or not, for as long as there is time."""
        if not self._registry.snapshots.kept:
            return
        await self._registry.settled()
        saving = [
            self._save(key, sandbox) for key, sandbox in self._registry.held() if key not in self._ending
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._save_s):
                await asyncio.gather(*self._ending.values(), *saving)

    async def _save(self, key: RunKey, sandbox: Sandbox) -> None:
        try:
            await self._registry.keep_workspace(key, sandbox)
        except SandfleetError as error:
            logger.warning("workspace not kept", extra={"run_id": str(key.run_id), "reason": error.code})
