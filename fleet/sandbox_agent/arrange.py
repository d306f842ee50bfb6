"""Changing what lies where: stat, mkdir, move, copy and remove. Each yields nothing and returns the result.

All but ``stat`` and ``mkdir`` run in a process of their own (``worker.py``), which may be killed at any point: what
was moved, copied or removed until then stays so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .describe import described
from .operation import Refused
from .paths import confined, entry, open_regular, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator

    from .operation import Json

_PIECE = 1024 * 1024


def status(spec: Json) -> Generator[bytes, None, Json]:
    """Kind, size, mode and time of what a path leads to."""
    path = confined(spec["path"])
    try:
        return described(os.stat(path))
    except OSError as error:
        raise refusal(error, spec["path"]) from None
    yield b""  # a generator like the others


def make_directory(spec: Json) -> Generator[bytes, None, Json]:
    """A directory with those above it; one that exists is fine."""
    path = confined(spec["path"])
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise refusal(error, spec["path"]) from None
    return {}
    yield b""


def remove(spec: Json) -> Generator[bytes, None, Json]:
    """A file, a link itself, or a directory: an empty one, or with all below it if ``recursive``."""
    path = entry(spec["path"])
    try:
        _remove(path, bool(spec.get("recursive")))
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise Refused(
                "not_empty", f"{spec['path']} is not empty: remove it with what is below it"
            ) from None
        raise refusal(error, spec["path"]) from None
    return {}
    yield b""


def move(spec: Json) -> Generator[bytes, None, Json]:
    """A file, link or directory to another path, which must not exist unless ``replace`` (a file by a file)."""
    source, target = _pair(spec)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise _between(error, spec) from None
        try:  # from one root to another
            _copy(source, target)
            _remove(source, recursive=True)
        except OSError as cause:
            raise _between(cause, spec) from None
    return {}
    yield b""


def copy(spec: Json) -> Generator[bytes, None, Json]:
    """A file, or a directory with all below it, to another path; links are copied as links, permissions kept."""
    source, target = _pair(spec)
    try:
        _copy(source, target)
    except OSError as error:
        raise _between(error, spec) from None
    return {}
    yield b""


def _pair(spec: Json) -> tuple[str, str]:
    source, target = entry(spec["path"]), entry(spec["to"])
    if target == source or target.startswith(source + "/"):
        raise Refused("bad_path", f"{spec['to']} lies in {spec['path']}")
    try:
        os.lstat(source)
    except OSError as error:
        raise refusal(error, spec["path"]) from None
    if os.path.lexists(target):
        if not spec.get("replace"):
            raise Refused("exists", f"{spec['to']} exists")
        if os.path.isdir(target) and not os.path.islink(target):
            raise Refused("is_a_directory", f"{spec['to']} is a directory")
        if os.path.isdir(source) and not os.path.islink(source):
            raise Refused("not_a_directory", f"{spec['to']} is no directory")
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
    except OSError as error:
        raise refusal(error, spec["to"]) from None
    return source, target


def _between(error: OSError, spec: Json) -> Refused:
    return refusal(error, f"{spec['path']} to {spec['to']}")


def _remove(path: str, recursive: bool) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    folders, emptied = [path] if recursive else [], []
    while folders:
        folder = folders.pop()
        emptied.append(folder)
        for item in _entries(folder):
            if item.is_dir(follow_symlinks=False):
                folders.append(item.path)
            else:
                os.unlink(item.path)
    for folder in reversed(emptied or [path]):
        os.rmdir(folder)


def _copy(source: str, target: str) -> None:
    status = os.lstat(source)
    if not stat.S_ISDIR(status.st_mode):
        _copy_one(source, target, status)
        return
    folders = [(source, target)]
    os.mkdir(target)
    while folders:
        source, target = folders.pop()
        for item in _entries(source):
            there = f"{target}/{item.name}"
            if item.is_dir(follow_symlinks=False):
                os.mkdir(there)
                folders.append((item.path, there))
            else:
                with contextlib.suppress(Refused):  # neither file nor link: sockets and pipes stay behind
                    _copy_one(item.path, there, item.stat(follow_symlinks=False))
        os.chmod(target, stat.S_IMODE(os.lstat(source).st_mode) | stat.S_IRWXU)


def _copy_one(source: str, target: str, status: os.stat_result) -> None:
    """A file or a link; the target is replaced in one step."""
    folder, name = os.path.split(target)
    part = os.path.join(folder, f"{name[:40]}.{os.urandom(6).hex()}.part")
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), part)
    else:
        reader = open_regular(source, os.O_RDONLY)
        try:
            _pour(reader, part, stat.S_IMODE(status.st_mode) & 0o777)
        finally:
            os.close(reader)
    os.replace(part, target)


def _pour(reader: int, part: str, mode: int) -> None:
    try:
        with open(part, "xb", buffering=0) as writer:
            os.fchmod(writer.fileno(), mode)
            while data := os.read(reader, _PIECE):
                view = memoryview(data)
                while view:
                    view = view[writer.write(view) or 0 :]
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)
