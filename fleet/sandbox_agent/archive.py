"""Packs a folder of a sandbox as a tar stream, or unpacks one: a program that the host runs as a command in the sandbox.

``save FOLDER`` writes the stream to stdout, ``restore FOLDER`` reads it from stdin. The last
line on stderr is a JSON object with ``files``, ``bytes`` (of their content) and ``skipped``: what could not be read or
made, and sockets. Like all of the agent it needs the standard library of Python 3.9 only.
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


class Counts:
    """What was packed or unpacked."""

    def __init__(self) -> None:
        self.files = self.bytes = self.skipped = 0


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
            left -= info.size
            counts.files += 1
            counts.bytes += info.size
    return counts


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
            try:
                if member.isdir():  # its own mode may forbid to put anything into it
                    folders.append((os.path.join(folder, member.name), member))
                    os.makedirs(folders[-1][0], exist_ok=True)
                    continue
                tar.extract(member, folder, **trusting)
            except (OSError, tarfile.ExtractError):
                counts.skipped += 1
                continue
            if member.isreg():
                counts.files += 1
                counts.bytes += member.size
    for path, member in reversed(folders):
        with contextlib.suppress(OSError):
            os.utime(path, (member.mtime, member.mtime))
            os.chmod(path, member.mode)
    return counts


if __name__ == "__main__":
    done = (
        save(sys.argv[2], sys.stdout.buffer)
        if sys.argv[1] == "save"
        else restore(sys.argv[2], sys.stdin.buffer)
    )
    sys.stderr.write(json.dumps(vars(done)) + "\n")
