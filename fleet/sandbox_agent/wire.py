"""The protocol between an agent and its host: frames, kinds and bounds, as ``docs/sandbox-protocol.md`` describes.

A frame is ``body length (u32), kind (u8), operation (u32)``, big endian, then the body.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NEWEST = OLDEST = 3  # versions of the protocol that this side speaks
HEADER = struct.Struct("!IBI")
CREDIT_BODY = struct.Struct("!I")
RESIZE_BODY = struct.Struct("!HH")  # rows, columns
MAX_BODY = 256 * 1024  # bytes; a longer frame is malformed
CHUNK = 64 * 1024  # bytes of content in one frame at most
WINDOW = 256 * 1024  # bytes that may be under way per operation and direction before the receiver grants more
MAX_OPERATIONS = 64  # at once on one connection

(
    HELLO,
    EXEC,
    KILL,
    READ,
    WRITE,
    FILES,
    DATA,
    EOF,
    STDOUT,
    STDERR,
    CREDIT,
    DONE,
    FAIL,
    PROCESS,
    RESIZE,
    FORGET,
) = range(1, 17)

ROOTS = ("/workspace", "/tmp")  # noqa: S108 - the writable mounts of a sandbox, not a temporary file
TAIL = 4096  # bytes of a stream's end that are kept when its middle is dropped
RING = 256 * 1024  # bytes of a background process's output that are kept, the newest
MAX_PROCESSES = 32  # background processes that run at once; as many ended ones are remembered
MAX_ENTRIES = 10_000  # of a listing, a glob or a grep
MAX_LINES_BYTES = 4 * 1024 * 1024  # of the JSON that tells them
REMEMBERED = 64  # named commands, those that have ended included
RESUME_S = 30.0  # how long a named command outlives its connection, and its result the end of it
UNKILLABLE_S = 3.0  # without any process dying: then the agent gives up and leaves the rest to the host
KILL_AT_MOST_S = 10.0  # the same, although some die: a sandbox short of memory and CPU dies slowly


class FrameError(Exception):
    """The peer sent something that is no frame."""


def pack(kind: int, op: int, body: bytes = b"") -> bytes:
    """One frame as bytes."""
    return HEADER.pack(len(body), kind, op) + body


class Decoder:
    """Cuts a byte stream into frames; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield the frames completed by ``data`` as (kind, operation, body); FrameError on a malformed header."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, kind, op = HEADER.unpack_from(self._buffer)
            if length > MAX_BODY or not HELLO <= kind <= FORGET:
                raise FrameError(f"kind {kind}, length {length}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield kind, op, body
