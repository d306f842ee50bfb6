"""Packs a folder of a sandbox as a tar stream, or unpacks one: a program that the host runs as a command in the sandbox.

``save FOLDER`` writes the stream to stdout, ``restore FOLDER`` reads it from stdin. The last
line on stderr is a JSON object with ``files`` and ``bytes`` (of their content) that the stream holds, ``skipped``: what
could not be read or made, and sockets, and ``missing``: files among these that could not be made. Or it has
``damaged``: why the stream cannot be read. Like all of the agent it needs the standard library of Python 3.9 only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tarfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO


_PIECE_BYTES = 64 * 1024
_BLOCK_BYTES = 4096  # of a file system; a hole is that large at least
_HOLE = bytes(_BLOCK_BYTES)


class Counts:
    """What was packed or unpacked."""

    def __init__(self) -> None:
        self.files = self.bytes = self.skipped = self.missing = 0


class _Exactly(io.RawIOBase):
    """A file as long as its header says, though it may grow or shrink while it is read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int = -1) -> bytes:
        size = self._left if size < 0 else min(size, self._left)
        data = self._file.read(size)
        self._left -= size
        return data + bytes(size - len(data))


def save(folder: str, stream: BinaryIO) -> Counts:
    """Pack what is below ``folder``. Processes may change it meanwhile: each file is as it was when it was read."""
    counts = Counts()
    volume = os.statvfs(folder)
    left = (
        volume.f_blocks * volume.f_frsize
    )  # a file with holes may claim to be larger than all of the volume
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in _below(folder, counts):
            try:
                info = tar.gettarinfo(path, os.path.relpath(path, folder))
                if info is None or info.size > left:  # None: a socket
                    counts.skipped += 1
                    continue
                if not info.isreg():
                    tar.addfile(info)
                    continue
                with open(path, "rb") as file:
                    tar.addfile(info, _Exactly(file, info.size))
            except OSError:  # it has gone, or may not be read
                counts.skipped += 1
                continue
            finally:
                _forget(tar)
            left -= info.size
            counts.files += 1
            counts.bytes += info.size
    return counts


def _forget(tar: Any) -> None:
    """Let go of the headers so far, which a tar keeps to its end: 65,536 files would take 100 MB of the sandbox."""
    tar.members.clear()


def _below(folder: str, counts: Counts) -> Iterator[str]:
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    yield entry.path
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            counts.skipped += 1


def restore(folder: str, stream: BinaryIO) -> Counts:
    """Replace all that is below ``folder`` by what the stream holds."""
    counts = Counts()
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
    # Who packed it was no more trusted than who unpacks it, and both are confined by the sandbox.
    trusting: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
    folders = []
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            _forget(tar)
            path = os.path.join(folder, member.name)
            if member.isreg():
                counts.files += 1
                counts.bytes += member.size
            try:
                if member.isdir():  # its own mode may forbid to put anything into it
                    folders.append((path, member.mtime, member.mode))
                    os.makedirs(path, exist_ok=True)
                elif member.isreg():
                    _unpack(tar, member, path)
                elif member.islnk() and not os.path.exists(os.path.join(folder, member.linkname)):
                    counts.skipped += 1  # that could not be packed
                else:
                    tar.extract(member, folder, **trusting)
            except (OSError, tarfile.ExtractError):
                counts.skipped += 1
                counts.missing += member.isreg()
    for path, mtime, mode in reversed(folders):
        with contextlib.suppress(OSError):
            os.utime(path, (mtime, mtime))
            os.chmod(path, mode)
    return counts


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Make a file. What is zero becomes a hole: a file with holes takes no more than it did."""
    source = tar.extractfile(member)
    if source is None:
        raise tarfile.ReadError("a file without content")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    left = member.size
    with open(path, "wb") as file:
        while left:
            piece = source.read(min(left, _PIECE_BYTES))
            if not piece:
                raise tarfile.ReadError("unexpected end of data")
            left -= len(piece)
            step = _BLOCK_BYTES if _HOLE in piece else len(piece)
            for start in range(0, len(piece), step):
                block = piece[start : start + step]
                if block.count(0) == len(block):
                    file.seek(len(block), os.SEEK_CUR)
                else:
                    file.write(block)
        file.truncate(member.size)
    os.chmod(path, member.mode)
    os.utime(path, (member.mtime, member.mtime))


def _main() -> dict[str, Any]:
    try:
        if sys.argv[1] == "save":
            return vars(save(sys.argv[2], sys.stdout.buffer))
        return vars(restore(sys.argv[2], sys.stdin.buffer))
    except tarfile.TarError as error:
        return {"damaged": str(error)}


if __name__ == "__main__":
    sys.stderr.write(json.dumps(_main()) + "\n")
