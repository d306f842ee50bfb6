"""Cleans up after a supervisor that died without doing so, even by SIGKILL: ``python -m sandfleet.localstack.watchdog``.

Its standard input is a pipe whose other end only the supervisor holds. Its end is the supervisor's end.
"""

import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from sandfleet.localstack.leftovers import clear

_LOCK_WAIT_S = 20.0


def main(supervisor: str, lock: Path, record: Path, instance: str, run_dir: Path) -> None:
    """Wait for the end of standard input, then clear the instance unless a successor already holds its lock.

    ``run_dir`` holds its sockets, ``supervisor`` is the process id to clean up after, as it stands in the lock file.
    """
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    deadline = time.monotonic() + _LOCK_WAIT_S
    with lock.open("a") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # The kernel closes a killed process's files one by one: the pipe may end before the lock is free.
                if lock.read_text() != supervisor or time.monotonic() > deadline:
                    return
                time.sleep(0.05)
            else:
                break
        clear(record, instance)
        (lock.parent / "dev.json").unlink(missing_ok=True)  # the stack that it tells of is gone
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
