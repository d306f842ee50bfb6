"""What the sandbox's control group says of its memory, by cgroup v2 or v1."""

from __future__ import annotations

import contextlib
import os

_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_LIMIT = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_PEAK = ("/sys/fs/cgroup/memory.peak", "/sys/fs/cgroup/memory/memory.max_usage_in_bytes")
_LARGE = (
    0.25  # of the limit: the kernel takes the largest, so a smaller one is told from the others by nothing
)
_NO_LIMIT = 2**60  # cgroup v1 says a number beyond this where there is none


_events: list[int] = []  # the file that tells, once it was opened


def oom_kills() -> int:
    """Processes of this sandbox that the kernel killed for memory; 0 where nobody tells."""
    if not _events:
        _events.append(_opened())
    with contextlib.suppress(OSError, ValueError):  # it is asked before and after each command
        for line in os.pread(_events[0], 4096, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill":
                return int(value)
    return 0


def _opened() -> int:
    for path in _EVENTS:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1


def limit_bytes() -> int | None:
    """The sandbox's memory limit, or None where there is none."""
    limit = _number(_LIMIT)
    return None if limit is None or limit >= _NO_LIMIT else limit


def is_large(size: int) -> bool:
    """Whether a process that had so many bytes is likely to be the one that was killed, when one was."""
    limit = limit_bytes()
    return limit is not None and size >= _LARGE * limit


def peak_bytes() -> int | None:
    """The most memory that the sandbox has used since it began, or None where nobody tells."""
    return _number(_PEAK)


def _number(paths: tuple[str, str]) -> int | None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return int(file.read())
    return None
