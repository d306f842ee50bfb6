"""Directory entries as the caller sees them."""

from __future__ import annotations

import contextlib
import json
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .operation import Json


def text(name: str) -> str:
    """A name as text: bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode("utf-8", "replace")


def described(status: os.stat_result | None) -> Json:
    """Kind (file, directory, symlink or other), size in bytes, permission bits and time of modification."""
    if status is None:
        return {"kind": "other", "size": 0, "mode": 0, "modified_s": 0}
    kind = "other"
    if stat.S_ISLNK(status.st_mode):
        kind = "symlink"
    elif stat.S_ISDIR(status.st_mode):
        kind = "directory"
    elif stat.S_ISREG(status.st_mode):
        kind = "file"
    mode, modified_s = stat.S_IMODE(status.st_mode), max(0, int(status.st_mtime))
    return {"kind": kind, "size": status.st_size, "mode": mode, "modified_s": modified_s}


def line(name: str, entry: os.DirEntry[str]) -> bytes:
    """A directory entry as a line of JSON; the entry itself, not what a link leads to."""
    status = None
    with contextlib.suppress(OSError):
        status = entry.stat(follow_symlinks=False)
    return json.dumps({"name": text(name), **described(status)}).encode() + b"\n"
