"""Workspaces on disk: a file of a fixed size with ext4 in it, as a loop device that a container mounts.

The file has no name, and the device is cleared by the kernel when nobody holds it any more: first whoever made it, then
the engine for as long as it is mounted. So nothing can be left behind, whoever is killed when.
"""

import asyncio
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from sandfleet.shared.errors import NoRoom, SandfleetError

_CONTROL = "/dev/loop-control"
# Of <linux/loop.h>: LOOP_CTL_GET_FREE, and LOOP_CONFIGURE (Linux 5.8), which attaches the file and sets flags in one.
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_CONFIG_BYTES, _FD_AT, _FLAGS_AT, _AUTOCLEAR = 304, 0, 60, 4
_ATTEMPTS = 100  # somebody else may take the device that the kernel has named
_MAKE_TIMEOUT_S = 60.0
_NO_ROOM = "The disk of this host has no room for a workspace of {} MiB."
_SPARE = 0.02  # of a file system, which must stay free when another sandbox may fill all that it may have

MOUNT_OPTIONS = "nosuid,nodev,noinit_itable"
"""Nothing is written that nobody has written. No ``discard``: what is deleted inside stays reserved for the workspace."""

_libc = ctypes.CDLL(None, use_errno=True)


class DiskUnavailable(SandfleetError):
    """No workspace can be made on disk here; the message says why."""

    code = "disk_unavailable"


def free_bytes(folder: Path) -> int:
    """What workspaces may still take of the file system of ``folder``, so that some of it stays free."""
    usage = shutil.disk_usage(folder)
    return max(0, int(usage.free - _SPARE * usage.total))


def most_bytes(folder: Path) -> int:
    """What workspaces may take of the file system of ``folder`` when nothing else is on it."""
    return int((1 - _SPARE) * shutil.disk_usage(folder).total)


@asynccontextmanager
async def workspace(folder: Path, size: int, inodes: int, uid: int) -> AsyncIterator[str]:
    """The path of a loop device with an empty file system of ``size`` bytes that belongs to ``uid``. It is there for as long as
    this lasts, and then for as long as somebody has it mounted. The file is in the file system of ``folder``, and has all of its
    space from the beginning: whatever others write, what was promised is there, and no more is ever taken.

    Raises NoRoom when its disk cannot hold it, and DiskUnavailable.
    """
    making = asyncio.ensure_future(asyncio.to_thread(_Device.make, folder, size, inodes, uid))
    try:
        device = await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: None if made.exception() else made.result().close())
        raise
    try:
        yield device.path
    finally:
        device.close()


class _Device:
    def __init__(self, path: str, held: BinaryIO) -> None:
        self.path = path
        self._held = held

    @classmethod
    def make(cls, folder: Path, size: int, inodes: int, uid: int) -> Self:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), size)
                if not free_bytes(folder):
                    raise NoRoom(_NO_ROOM.format(size // 2**20))
                path, held = _attach(file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise NoRoom(_NO_ROOM.format(size // 2**20)) from error
            raise DiskUnavailable(f"no loop device can be used ({error})") from error
        try:
            options = f"root_owner={uid}:{uid},lazy_itable_init=1,nodiscard"
            features = ("-O", "^has_journal", "-m", "0", "-N", str(inodes), "-E", options)
            _run("mkfs.ext4", "-q", *features, path)
            _run("debugfs", "-w", "-R", "rmdir lost+found", path)
        except BaseException:
            held.close()
            raise
        return cls(path, held)

    def close(self) -> None:
        self._held.close()


def _reserve(descriptor: int, size: int) -> None:
    """Let a new file take ``size`` bytes of its disk. Not os.posix_fallocate: where that cannot be done it writes them all."""
    if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        raise OSError(number, f"no space can be reserved: {os.strerror(number)}")


def _attach(file: Any) -> tuple[str, BinaryIO]:
    """A free loop device over the file, which is cleared when it is closed and nobody has it mounted."""
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("=I", config, _FD_AT, file.fileno())
    struct.pack_into("=I", config, _FLAGS_AT, _AUTOCLEAR)
    with open(_CONTROL, "rb") as control:
        for _ in range(_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}"
            device = open(path, "r+b", buffering=0)  # noqa: SIM115 - it is the caller's
            try:
                fcntl.ioctl(device, _CONFIGURE, bytes(config))
            except OSError as error:
                device.close()
                if error.errno != errno.EBUSY:
                    raise
                continue
            return path, device
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), _CONTROL)


def _run(program: str, *arguments: str) -> None:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise DiskUnavailable(f"there is no {program}: install e2fsprogs")
    try:
        ended = subprocess.run(
            [found, *arguments], capture_output=True, text=True, timeout=_MAKE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiskUnavailable(f"{program} failed: {error}") from error
    if ended.returncode:
        raise DiskUnavailable(f"{program} failed: {ended.stderr.strip()[-200:]}")
