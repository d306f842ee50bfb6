"""Cleans up after a supervisor that died without doing so, even by SIGKILL: ``python -m sandfleet.localstack.watchdog``.

Its standard input is a pipe whose other end only the supervisor holds. Its end is the supervisor's end.
"""

import fcntl
import os
import signal
import sys
from pathlib import Path

from sandfleet.localstack.leftovers import clear


def main(lock: Path, record: Path, instance: str) -> None:
    """Wait for the end of standard input, then clear the instance unless a successor already holds its lock."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    with lock.open("a") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        clear(record, instance)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
