"""Sandboxes that are ready and frozen before anybody asks for one, so that an acquire waits for no start."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import NamedTuple

from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.templates import Template

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_LONGEST_PAUSE_S = 30.0  # between attempts while no sandbox of a template can be started
_MOST_FAILURES = 10  # that lengthen it


class Refill(NamedTuple):
    """How many are started in a second at most, and the age at which one is replaced (s)."""

    per_s: float
    most_age_s: float


class _Pause:
    """How often a template has failed in a row, and when it is tried again (monotonic)."""

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0


class _Warm(NamedTuple):
    sandbox: Sandbox
    since: float


class WarmPool:
    """Frozen sandboxes that belong to nobody yet, as many of each template as it says.

    They are counted by ``len``, the one that is being started too.
    """

    def __init__(
        self,
        refill: Refill,
        templates: Iterable[Template],
        start: Callable[[Template], Awaitable[Sandbox]],
        discard: Callable[[Sandbox], Coroutine[None, None, None]],
        may_start: Callable[[Template], bool],
    ) -> None:
        """``start`` starts one, ``discard`` removes one, ``may_start`` says whether there is room and time for another."""
        self._refill = refill
        self._start = start
        self._discard = discard
        self._may_start = may_start
        # Oldest first in each.
        self._ready: dict[str, deque[_Warm]] = {t.name: deque() for t in templates if t.warm}
        self._templates = [t for t in templates if t.warm]
        """Whose turn it is comes first."""
        self._pauses = {t.name: _Pause() for t in self._templates}
        self._starting: tuple[Template, asyncio.Task[None]] | None = None
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return self.ready + (self._starting is not None)

    @property
    def ready(self) -> int:
        """Those that can be taken now."""
        return sum(map(len, self._ready.values()))

    def taken_by(self) -> list[Template]:
        """The templates of all, for counting what they take."""
        held = [warm.sandbox.template for each in self._ready.values() for warm in each]
        return held if self._starting is None else [*held, self._starting[0]]

    def has(self, template: Template) -> bool:
        """Whether one of this template can be taken now."""
        return bool(self._ready.get(template.name))

    async def take(self, template: Template) -> Sandbox | None:
        """The oldest, thawed; None if there is none. It is the caller's from then on."""
        ready = self._ready.get(template.name)
        while ready:
            sandbox = ready.popleft().sandbox
            self._changed.set()
            if await sandbox.thaw() and sandbox.alive:
                return sandbox
            self._remove(sandbox)
        return None

    def evict(self) -> bool:
        """Give up one for somebody who needs its room; false if there is none."""
        if self._starting is not None:
            (_, starting), self._starting = self._starting, None
            starting.cancel()  # it leaves nothing behind
            return True
        most = max(self._ready.values(), key=len, default=None)
        if most:
            self._remove(most.popleft().sandbox)
            return True
        return False

    async def keep(self) -> None:
        """For ever: keep the pool full, and its members young."""
        while not self._closed:
            self._expire()
            missing = [t for t in self._templates if len(self._ready[t.name]) < t.warm]
            if (wanted := self._next(missing)) is not None:
                await self._start_one(wanted)
            if missing:
                await asyncio.sleep(1 / self._refill.per_s)
            else:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._changed.wait()

    def _next(self, missing: list[Template]) -> Template | None:
        """Which to start now: they take turns, and one that fails pauses without the others."""
        now = time.monotonic()
        for template in missing:
            if self._pauses[template.name].until <= now and self._may_start(template):
                self._templates.remove(template)
                self._templates.append(template)
                return template
        return None

    async def _start_one(self, template: Template) -> None:
        task = asyncio.create_task(self._add(template), name="start a warm sandbox")
        self._starting = template, task
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.wait([task])
        if self._starting == (template, task):
            self._starting = None

    async def _add(self, template: Template) -> None:
        pause = self._pauses[template.name]
        try:
            sandbox = await self._start(template)
        except (SandfleetError, OSError) as error:
            pause.failures = min(pause.failures + 1, _MOST_FAILURES)
            pause.until = time.monotonic() + min(2.0**pause.failures / self._refill.per_s, _LONGEST_PAUSE_S)
            reason = error.code if isinstance(error, SandfleetError) else type(error).__name__
            logger.warning(
                "no warm sandbox could be started", extra={"template": template.name, "reason": reason}
            )
            return
        pause.failures = 0
        try:
            frozen = await sandbox.freeze()
        except asyncio.CancelledError:
            self._remove(sandbox)
            raise
        if frozen and sandbox.alive and not self._closed:
            self._ready[template.name].append(_Warm(sandbox, time.monotonic()))
        else:
            self._remove(sandbox)

    def lost(self, sandbox: Sandbox) -> bool:
        """Forget one that has ended by itself; false if it was none of ours. The caller removes it."""
        for ready in self._ready.values():
            for warm in ready:
                if warm.sandbox is sandbox:
                    ready.remove(warm)
                    self._changed.set()
                    return True
        return False

    def _expire(self) -> None:
        oldest = time.monotonic() - self._refill.most_age_s
        for ready in self._ready.values():
            while ready and ready[0].since < oldest:
                self._remove(ready.popleft().sandbox)

    def _remove(self, sandbox: Sandbox) -> None:
        removal = asyncio.create_task(self._discard(sandbox), name=f"remove warm sandbox {sandbox.id}")
        self._background.add(removal)
        removal.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Remove all."""
        self._closed = True
        while self.evict():
            pass
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
