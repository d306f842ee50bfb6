"""Named points in a process's work at which a test can kill it, stop it, or lose the reply that it waits for.

Without ``SANDFLEET_FAULT_POINTS`` every point is a call of an empty function. With it (a directory), a point looks for a
file of its own name there. The first process that reaches the point takes the file away and does what it says:

- ``kill``: the process dies as by ``kill -9``;
- ``stop``: the process stops as by ``kill -STOP``, until somebody sends it a SIGCONT;
- ``lose``: what was just done stays done, but its caller sees a lost database connection.

At a point that tasks pass (``meet``), ``kill 20`` holds those that come until twenty are there, and then kills the process.
"""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg

VARIABLE = "SANDFLEET_FAULT_POINTS"


def _nothing(name: str) -> None:
    """Production: no point does anything."""


def _from_directory(directory: Path) -> Callable[[str], None]:
    def reach(name: str) -> None:
        taken = directory / f"{name}.reached-by-{os.getpid()}"
        try:
            (directory / name).rename(taken)
        except FileNotFoundError:
            return
        match taken.read_text().strip():
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # To this thread: one that is sent to the process may reach it late, when it has gone past the point.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "lose":
                raise psycopg.OperationalError(f"the reply was lost at the fault point {name!r}")
            case other:
                raise ValueError(f"fault point {name!r}: kill, stop or lose, not {other!r}")

    return reach


reach: Callable[[str], None] = (
    _from_directory(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else _nothing
)
"""Pass the named point; see the module's description."""


async def _pass(name: str) -> None:
    """Production: nobody is held."""


def _met_in_directory(directory: Path) -> Callable[[str], Awaitable[None]]:
    met: Counter[str] = Counter()

    async def meet(name: str) -> None:
        try:
            action, _, wanted = (directory / name).read_text().partition(" ")
        except FileNotFoundError:
            return
        if wanted:
            met[name] += 1
            if met[name] < int(wanted):
                await asyncio.Event().wait()
            (directory / name).write_text(action)
        reach(name)

    return meet


meet: Callable[[str], Awaitable[None]] = (
    _met_in_directory(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else _pass
)
"""Pass the named point of a task; see the module's description."""
