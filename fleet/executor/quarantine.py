"""A process of its own for runs that may kill their executor: an executor that takes nothing else, one at a time.

Its parent starts it when such runs wait, and it ends when none is left. If it dies, its parent has seen who did it. The pipe
between them ends with the parent, however that ends; what still runs is handed over then, which counts as no death.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable

from sandfleet.fleet.executor.registration import executor_id
from sandfleet.fleet.executor.session import Session
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.suspects import killed, suspects_wait

_log = logging.getLogger(__name__)

FLAG = "--suspects"
"""Argument of the process that takes suspects; its executor id follows."""


class Quarantine:
    """The parent's side: one such process at most."""

    def __init__(self, settings: Settings, chores: Session) -> None:
        self._settings = settings
        self._chores = chores
        self._process: Process | None = None
        self._owner = ""  # its executor id

    @property
    def alive(self) -> bool:
        """Whether there is such a process now."""
        return self._process is not None and self._process.returncode is None

    async def look_for_suspects(self) -> None:
        """Start the process when runs wait for it and it is our turn. Raises what asking or starting raised."""
        if self.alive:
            return
        limit = self._settings.poison_limit
        async with self._chores.connection() as connection:
            if self._process is not None and self._process.returncode != 0:
                if await killed(connection, self._owner, limit):
                    _log.warning("a run has killed the process that it had for itself")
                self._process = None
            if not await suspects_wait(connection, self._settings.pool, limit):
                return
        _log.warning("runs wait whose executors died again and again: each gets a process for itself")
        self._owner = executor_id(self._settings.pool)
        argv = (sys.executable, "-P", "-m", "sandfleet.fleet.executor", FLAG, self._owner)
        # In a session of its own: what is sent to the parent's group, by a terminal for instance, is not meant for it.
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, start_new_session=True)

    def dismiss(self) -> None:
        """Have it hand its run over and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def ended(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            await self._process.wait()


def when_parent_ends(leave: Callable[[], None]) -> None:
    """Have the running loop call ``leave``, once, when the parent lets go of the pipe or dies."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            leave()

    loop.add_reader(sys.stdin.fileno(), readable)
