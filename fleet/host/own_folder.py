"""The folder of a sandbox host: one process has it at a time, and whoever finds it free knows that its host is dead."""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from sandfleet.shared.errors import SandfleetError

logger = logging.getLogger(__name__)

_LOCK = "lock"
_REAPED = b"reaper"  # in the lock while a reaper has it
_PATIENCE_S = 5.0  # who looks whether a host is dead holds its folder for a moment
_LOOK_AGAIN_S = 0.1

SANDBOXES = "sandboxes"
"""Has a folder for each sandbox, by its id."""
STATE = "state"
"""What the next life of the host has to know of its sandboxes."""
REST = ("agent", "snapshots")
"""What every life makes anew."""


@asynccontextmanager
async def own_folder(folder: Path) -> AsyncIterator[Path]:
    """Own ``folder``, private to this user, for as long as this lasts; yields the folder for sandboxes in it.

    Waits for a reaper that clears the folder. Raises SandfleetError if another host has it.
    """
    with _made(folder).open("a") as lock:
        patient_until = time.monotonic() + _PATIENCE_S
        told = False
        while not _taken(lock):
            if time.monotonic() > patient_until:
                if not is_reaped(folder):
                    raise SandfleetError(f"Another sandbox host works in {folder}; set SANDFLEET_HOST_DIR.")
                if not told:
                    told = True
                    logger.warning("waits for a reaper that clears this host's folder")
            await asyncio.sleep(_LOOK_AGAIN_S)
        lock.truncate(0)
        sandboxes = folder / SANDBOXES
        sandboxes.mkdir(exist_ok=True)
        yield sandboxes


def _made(folder: Path) -> Path:
    """Make the folder if it is not there, and make it private; its lock."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder / _LOCK


@contextmanager
def of_the_dead(folder: Path) -> Iterator[bool]:
    """Whether the host of ``folder`` is dead, as far as can be seen from here; while this lasts no other takes the folder, and
    its host waits.

    A folder that is not there, or not to be read, says nothing against it.
    """
    try:
        lock = (folder / _LOCK).open("r+")
    except OSError:
        yield True
        return
    with lock:
        if dead := _taken(lock):
            with suppress(OSError):  # a disk that is full must not keep it from being cleared
                os.pwrite(lock.fileno(), _REAPED, 0)
        yield dead


def is_reaped(folder: Path) -> bool:
    """Whether it is a reaper that has the folder, given that somebody has."""
    with suppress(OSError):
        return (folder / _LOCK).read_bytes() == _REAPED
    return False


def _taken(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
