"""A sandbox's workspace as one compressed file, and back: tar, packed in the sandbox, and zstd, by the host."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from sandfleet.fleet.host.agent_link import Operation
from sandfleet.fleet.host.backend import WORKSPACE
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox.errors import SnapshotDamaged, SnapshotFailed
from sandfleet.fleet.sandbox_agent import archive
from sandfleet.shared.ids import Fence

# Given as text: not every backend lets commands read the agent's folder.
_PROGRAM = ["python3", "-I", "-S", "-c", Path(archive.__file__).read_text()]
_TIMEOUT_S = 300.0
_TOLD_BYTES = 8 * 1024  # of what the program says; what counts is its last line
_LEVEL = 3  # of zstd, its default: packs some 300 MB/s
_PIECE_BYTES = 1024 * 1024  # worth a thread's time
_HEADERS = (
    2  # a tar of empty files with long names is larger than they are, but not than this times the workspace
)


@dataclass(frozen=True, slots=True)
class Packed:
    """What a snapshot holds: number of files, bytes of their content, and how much of the tree was skipped; ``missing`` of the
    files could not be made."""

    files: int
    bytes: int
    skipped: int
    missing: int


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
        async with aclosing(sandbox.exec(fence, spec, None)) as events:  # leaving early ends the program
            async for event, data in events:
                if event == "stdout":
                    pending += data
                    if len(pending) >= _PIECE_BYTES:
                        await asyncio.to_thread(write, bytes(pending))
                        pending.clear()
                elif event == "stderr":
                    told = _end(told, data)
                elif data["exit_code"] != 0 or data["dropped_bytes"]:
                    raise SnapshotFailed(f"The workspace could not be packed: {_last_line(told)}")
        await asyncio.to_thread(write, bytes(pending), last=True)
    packed = _counts(told)
    if packed is None:
        raise SnapshotFailed(f"The workspace could not be packed: {_last_line(told)}")
    return packed


async def restore(sandbox: Sandbox, fence: Fence, source: Path) -> Packed:
    """Replace the workspace by what ``source`` holds. Raises SnapshotDamaged if that is no such archive, SnapshotFailed if the
    sandbox did not unpack it."""
    spec = {
        "argv": [*_PROGRAM, "restore", WORKSPACE],
        "timeout_s": _TIMEOUT_S,
        "output_bytes": 64 * 1024,
        "stdin": True,
    }
    told = bytearray()
    with source.open("rb") as file:
        async with sandbox.command(fence, spec) as command:
            feeder = asyncio.create_task(_feed(command, file))
            try:
                data: Any
                async for event, data in sandbox.events(command):
                    if event == "stderr":
                        told = _end(told, data)
                await feeder
            except zstandard.ZstdError as error:
                raise SnapshotDamaged("The snapshot is damaged: it is no zstd archive.") from error
            finally:
                feeder.cancel()
    if why := _damaged(told):
        raise SnapshotDamaged(f"The snapshot is damaged: {why}.")
    unpacked = _counts(told)
    if unpacked is None:
        raise SnapshotFailed(f"The snapshot could not be unpacked: {_last_line(told)}")
    return unpacked


async def _feed(command: Operation, file: BinaryIO) -> None:
    """Send the archive's content; also what cannot be decompressed ends the program, which waits for more."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(file) as reader:
            while piece := await asyncio.to_thread(reader.read, _PIECE_BYTES):
                await command.send(piece)
    finally:
        await command.send_eof()


def _end(told: bytearray, data: bytes) -> bytearray:
    """What the program has said, its end alone: it is a sandbox's, which could say as much as its output may have."""
    return (told + data)[-_TOLD_BYTES:]


def _counts(told: bytes | bytearray) -> Packed | None:
    """What the program says of itself at its end; None if it did not come to that."""
    try:
        counts = json.loads(told.splitlines()[-1])
        packed = Packed(*(int(counts[name]) for name in ("files", "bytes", "skipped", "missing")))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    return packed if all(0 <= count < 2**63 for count in astuple(packed)) else None


def _damaged(told: bytes | bytearray) -> str | None:
    """Why the program could not read the archive, if it says so."""
    try:
        return str(json.loads(told.splitlines()[-1])["damaged"])[:200]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None


def _last_line(told: bytes | bytearray) -> str:
    lines = told.decode(errors="replace").splitlines()
    return lines[-1][:200] if lines else "no answer"
