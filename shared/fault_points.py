"""Named points in a process's work at which a test can kill it, stop it, or lose the reply that it waits for.

Without ``SANDFLEET_FAULT_POINTS`` every point is a call of an empty function. With it (a directory), a point looks for a
file of its own name there. The first process that reaches the point takes the file away and does what it says:

- ``kill``: the process dies as by ``kill -9``;
- ``stop``: the process stops as by ``kill -STOP``, until somebody sends it a SIGCONT;
- ``lose``: what was just done stays done, but its caller sees a lost database connection.
"""

import os
import signal
from collections.abc import Callable
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
                os.kill(os.getpid(), signal.SIGSTOP)
            case "lose":
                raise psycopg.OperationalError(f"the reply was lost at the fault point {name!r}")
            case other:
                raise ValueError(f"fault point {name!r}: kill, stop or lose, not {other!r}")

    return reach


reach: Callable[[str], None] = (
    _from_directory(Path(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else _nothing
)
"""Pass the named point; see the module's description."""
