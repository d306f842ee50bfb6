"""A sandbox's workspace as one compressed file, and back: tar, packed in the sandbox, and zstd, by the host."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from sandfleet.fleet.host.backend import WORKSPACE
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox.errors import SnapshotFailed
from sandfleet.fleet.sandbox_agent import archive
from sandfleet.shared.ids import Fence

# Given as text: not every backend lets commands read the agent's folder.
_PROGRAM = ["python3", "-I", "-S", "-c", Path(archive.__file__).read_text()]
_TIMEOUT_S = 300.0
_LEVEL = 3  # of zstd, its default: packs some 300 MB/s
_PIECE_BYTES = 1024 * 1024  # worth a thread's time
_HEADERS = (
    2  # a tar of empty files with long names is larger than they are, but not than this times the workspace
)


@dataclass(frozen=True, slots=True)
class Packed:
    """What a snapshot holds: number of files, bytes of their content, and how much of the tree was skipped."""

    files: int
    bytes: int
    skipped: int


async def save(sandbox: Sandbox, fence: Fence, target: Path, workspace_bytes: int, most_bytes: int) -> Packed:
    """Write the workspace to ``target``. Raises SnapshotFailed if it would be longer than ``most_bytes``, or the
    sandbox cannot pack it."""
    spec = {
        "argv": [*_PROGRAM, "save", WORKSPACE],
        "timeout_s": _TIMEOUT_S,
        "output_bytes": _HEADERS * workspace_bytes,
    }
    told = bytearray()
    with target.open("wb") as file:
        packer = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        pending = bytearray()

        def write(data: bytes, *, last: bool = False) -> None:
            file.write(packer.compress(data))
            if last:
                file.write(packer.flush())
            if file.tell() > most_bytes:
                raise SnapshotFailed(
                    f"The workspace does not fit into a snapshot of {most_bytes} bytes; remove what can be made again."
                )

        data: Any
        async for event, data in sandbox.exec(fence, spec, None):
            if event == "stdout":
                pending += data
                if len(pending) >= _PIECE_BYTES:
                    await asyncio.to_thread(write, bytes(pending))
                    pending.clear()
            elif event == "stderr":
                told += data
            elif data["exit_code"] != 0 or data["dropped_bytes"]:
                raise _failed("packed", told)
        await asyncio.to_thread(write, bytes(pending), last=True)
    return _counts("packed", told)


async def restore(sandbox: Sandbox, fence: Fence, source: Path) -> Packed:
    """Replace the workspace by what ``source`` holds. Raises SnapshotFailed if that cannot be."""
    spec = {
        "argv": [*_PROGRAM, "restore", WORKSPACE],
        "timeout_s": _TIMEOUT_S,
        "output_bytes": 64 * 1024,
        "stdin": True,
    }
    told = bytearray()
    with source.open("rb") as file:
        async with sandbox.command(fence, spec) as command:

            async def feed() -> None:
                async for piece in _pieces(file):
                    await command.send(piece)
                await command.send_eof()

            data: Any
            async with asyncio.TaskGroup() as group:
                group.create_task(feed())
                async for event, data in sandbox.events(command):
                    if event == "stderr":
                        told += data
                    elif event == "exit" and data["exit_code"] != 0:
                        raise _failed("unpacked", told)
    return _counts("unpacked", told)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    with zstandard.ZstdDecompressor().stream_reader(file) as reader:
        while piece := await asyncio.to_thread(reader.read, _PIECE_BYTES):
            yield piece


def _counts(done: str, told: bytearray) -> Packed:
    try:
        counts = json.loads(told.splitlines()[-1])
        return Packed(int(counts["files"]), int(counts["bytes"]), int(counts["skipped"]))
    except (ValueError, KeyError, TypeError, IndexError):
        raise _failed(done, told) from None


def _failed(done: str, told: bytearray) -> SnapshotFailed:
    lines = told.decode(errors="replace").splitlines()
    return SnapshotFailed(f"The workspace could not be {done}: {lines[-1][:200] if lines else 'no answer'}")
