"""Ends sandboxes that are beyond their template's lifetime, or that nobody has used for as long as it allows."""

import asyncio
import logging
import time

from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class Lifetimes:
    """Of the sandboxes of one host."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looking: dict[RunKey, asyncio.Task[None]] = {}
        """Whose sandboxes are idle, and are being looked at."""

    async def run(self) -> None:
        """For ever: look at every sandbox each second."""
        try:
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                await self._look()
        finally:
            for looking in self._looking.values():
                looking.cancel()

    async def _look(self) -> None:
        now = time.monotonic()
        over = [(key, s) for key, s in self._registry.held() if now - s.born > s.template.lifetime_s]
        await asyncio.gather(*(self._end_over(key, sandbox) for key, sandbox in over))
        for key, sandbox in self._registry.held():
            limit_s = sandbox.template.idle_s
            if limit_s is not None and sandbox.idle_s() > limit_s and key not in self._looking:
                self._looking[key] = asyncio.create_task(
                    self._end_idle(key, sandbox, limit_s), name=f"end idle {sandbox.id}"
                )

    async def _end_over(self, key: RunKey, sandbox: Sandbox) -> None:
        logger.warning("sandbox beyond its lifetime", extra={"run_id": str(key.run_id), "tenant": key.tenant})
        limit_s = sandbox.template.lifetime_s
        await self._registry.remove(
            key, lost=f"The sandbox was lost: it reached its lifetime of {limit_s:.0f} s."
        )

    async def _end_idle(self, key: RunKey, sandbox: Sandbox, limit_s: float) -> None:
        """End a sandbox that nobody has used for long, unless something runs in it. Its workspace is kept."""
        asked = sandbox.asked
        why = f"The sandbox was ended: for {limit_s:g} s nobody had used it."
        try:
            if not await sandbox.runs_something(self._registry.fence(key)):
                await self._registry.end(key, sandbox, asked, why)
        except SandfleetError as error:
            logger.warning("idle sandbox not ended", extra={"sandbox": sandbox.id, "reason": error.code})
        finally:
            del self._looking[key]
