"""Where the memory of crashed processes goes. The kernel asks no limit of a sandbox before it starts a program for that."""

from pathlib import Path

_PATTERN = Path("/proc/sys/kernel/core_pattern")


def leave_the_sandbox(pattern: Path = _PATTERN) -> bool:
    """Whether a crash in a sandbox hands its memory to a program (``|``) or a socket (``@``) of the machine (core(5))."""
    try:
        return pattern.read_text().startswith(("|", "@"))
    except OSError:
        return False
