"""Paths of the caller, confined to the roots.

The check and the use of a path are two steps, and a command may put a link in between: confinement keeps callers from
mistakes. What holds a hostile command is the sandbox around it, in which the agent may open nothing more than the
command itself.
"""

from __future__ import annotations

import os
import stat

from .operation import Refused
from .wire import ROOTS

_CODES = {
    "FileNotFoundError": "not_found",
    "FileExistsError": "exists",
    "NotADirectoryError": "not_a_directory",
    "IsADirectoryError": "is_a_directory",
    "PermissionError": "permission_denied",
}


def confined(path: str) -> str:
    """The real path behind ``path`` (relative ones start in /workspace), or Refused if it lies outside the roots."""
    if not isinstance(path, str) or "\0" in path or not path:
        raise Refused("bad_path", "the path is empty or contains NUL")
    try:
        real = os.path.realpath(os.path.join(ROOTS[0], path))
    except (OSError, ValueError) as error:
        raise Refused("bad_path", str(error)) from None
    if not any(real == root or real.startswith(root + "/") for root in ROOTS):
        raise Refused("outside", f"{path} is outside of {' and '.join(ROOTS)}")
    return real


def entry(path: str) -> str:
    """Like ``confined``, but of the directory entry itself: a link at the end of the path is not followed.

    Refused for a root itself.
    """
    if not isinstance(path, str) or "\0" in path:
        raise Refused("bad_path", "the path is empty or contains NUL")
    folder, name = os.path.split(os.path.join(ROOTS[0], path).rstrip("/"))
    if name in ("", ".", ".."):
        folder, name = os.path.split(confined(path))
    real = os.path.join(confined(folder or "/"), name) if folder != "/" else f"/{name}"
    if real in ROOTS or not any(real.startswith(root + "/") for root in ROOTS):
        raise Refused("outside", f"{path} is not below {' or '.join(ROOTS)}")
    return real


def open_regular(path: str, flags: int) -> int:
    """Open a regular file; never blocks on a pipe or a device that lies at the path."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise refusal(error, path) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        os.close(fd)
        if is_directory:
            raise Refused("is_a_directory", f"{path} is a directory")
        raise Refused("not_a_file", f"{path} is not a regular file")
    return fd


def refusal(error: OSError, path: str) -> Refused:
    """An operating system error on ``path`` as a stable code and a message."""
    return Refused(_CODES.get(type(error).__name__, "io_error"), f"{path}: {error.strerror or error}")
