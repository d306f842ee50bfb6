"""The host's end of the connection to an agent. Every byte that comes in is taken for hostile."""

import asyncio
import hmac
import json
import logging
import socket
from collections import deque
from typing import Any

from sandfleet.fleet.host import results
from sandfleet.fleet.host.results import MAX_RESULT_BYTES, Asked, ProtocolError
from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxBusy, SandboxLost
from sandfleet.fleet.sandbox_agent import wire

logger = logging.getLogger(__name__)

_MAX_OPERATIONS = 32  # at once in one sandbox; the agent allows twice as many
_MAX_BACKLOG_BYTES = 4 * 1024 * 1024  # unread by the agent; more means that it stopped reading
_SEND_TIMEOUT_S = 30.0
_SOON_S = 1.0
# An honest agent gathers small pieces, so this pace never slows it (160 MB/s in full frames); a hostile one that
# floods with tiny frames waits here instead of taking the host's CPU from other sandboxes.
_PACE_FRAMES, _PACE_S = 256, 0.1
_MANY_PIECES = (
    1024  # of an operation's content that wait; more are joined although another stream's came in between
)


class Operation:
    """One operation under way. Content is taken with ``take()``; at its end ``result`` says how it ended."""

    def __init__(
        self, link: "AgentLink", op: int, asked: Asked, allowed: frozenset[int], most_bytes: int
    ) -> None:
        self.op = op
        self.asked = asked
        self.result: dict[str, Any] | None = None
        self.ended = asyncio.Event()
        self._link = link
        self._allowed = allowed
        self._left = dict.fromkeys(allowed, most_bytes)
        self._queue: deque[tuple[int, bytes | bytearray]] = deque()
        self._wake = asyncio.Event()
        self._window = wire.WINDOW  # what the agent may still send
        self._ungranted = 0
        self._credit = wire.WINDOW  # what the host may still send
        self._credited = asyncio.Event()
        self.discarding = False
        self.discarded_bytes = 0

    @property
    def backlog(self) -> bool:
        """Whether content waits for whoever takes it."""
        return bool(self._queue)

    async def take(self) -> tuple[int, bytes] | None:
        """The next content frame as (kind, bytes), or None when the operation has ended well.

        Raises OperationRefused if the agent could not do it, SandboxLost if the sandbox ended.
        """
        while not self._queue and not self.ended.is_set():
            self._wake.clear()
            await self._wake.wait()
        if self._queue:
            kind, body = self._queue.popleft()
            self._grant(len(body))
            return kind, bytes(body)
        if self.result is None:
            raise self._link.lost()
        if "code" in self.result:
            raise OperationRefused(self.result["code"], self.result["message"])
        return None

    async def send(self, data: bytes) -> None:
        """Send content, as fast as the agent takes it; silently nothing once the operation has ended."""
        view = memoryview(data)
        while view and not self.ended.is_set():
            if self._credit <= 0:
                self._credited.clear()
                await self._credited.wait()
                continue
            part = view[: min(wire.CHUNK, self._credit)]
            self._credit -= len(part)
            await self._link.send(wire.DATA, self.op, bytes(part))
            view = view[len(part) :]

    async def send_eof(self) -> None:
        """Say that no content follows."""
        if not self.ended.is_set():
            await self._link.send(wire.EOF, self.op)

    def resize(self, rows: int, columns: int) -> None:
        """Give the command's terminal another size."""
        if not self.ended.is_set():
            self._link.post(wire.RESIZE, self.op, wire.RESIZE_BODY.pack(rows, columns))

    def kill(self) -> None:
        """Ask the agent to kill the command's process tree, and drop what it still sends."""
        if not self.ended.is_set():
            self._link.post(wire.KILL, self.op)
        self.discard()

    def discard(self) -> None:
        """Drop all content from now on."""
        self.discarding = True
        while self._queue:
            self._discard(self._queue.popleft()[1])

    def _keep(self, kind: int, body: bytes) -> None:
        """Let content wait. Small pieces are joined: the window bounds bytes, and a piece of one byte takes a hundred."""
        reach = 1 if len(self._queue) < _MANY_PIECES else len(self._allowed)
        for back in range(1, min(reach, len(self._queue)) + 1):
            last, kept = self._queue[-back]
            if last == kind and len(kept) + len(body) <= wire.CHUNK:
                joined = kept if isinstance(kept, bytearray) else bytearray(kept)
                joined += body
                self._queue[-back] = kind, joined
                return
        self._queue.append((kind, body))

    def _discard(self, body: bytes | bytearray) -> None:
        self.discarded_bytes += len(body)
        self._grant(len(body))

    def received(self, kind: int, body: bytes) -> None:
        """A frame from the agent for this operation; ProtocolError if it may not send it."""
        if kind in self._allowed:
            self._left[kind] -= len(body)
            self._window -= len(body)
            if not body or self._window < 0 or self._left[kind] < 0:
                raise ProtocolError("content that is empty, beyond the window or beyond the limit")
            if self.discarding:
                self._discard(body)
            else:
                self._keep(kind, body)
                self._wake.set()
        elif kind == wire.CREDIT:
            if len(body) != wire.CREDIT_BODY.size:
                raise ProtocolError("credit of the wrong size")
            self._credit += wire.CREDIT_BODY.unpack(body)[0]
            if self._credit > wire.WINDOW:
                raise ProtocolError("credit that was never used")
            self._credited.set()
        elif kind in (wire.DONE, wire.FAIL):
            self.result = results.result(self.asked, body) if kind == wire.DONE else results.failure(body)
            self.end()
        else:
            raise ProtocolError(f"kind {kind} for this operation")

    def end(self) -> None:
        """Wake everybody who waits: nothing more will come."""
        self.ended.set()
        self._wake.set()
        self._credited.set()

    def _grant(self, size: int) -> None:
        self._window += size
        self._ungranted += size
        if self._ungranted >= wire.WINDOW // 4 and not self.ended.is_set():
            self._link.post(wire.CREDIT, self.op, wire.CREDIT_BODY.pack(self._ungranted))
            self._ungranted = 0


class AgentLink:
    """One agent's connection: many operations at once, each with its own window in both directions."""

    HUNG_UP = "its agent ended the connection"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._operations: dict[int, Operation] = {}
        self._next_op = 1
        self.version = 0  # of the protocol
        self._later = b""  # frames that go with the next one
        self._reason: str | None = None
        self._ended = False
        self.told_somebody = False  # whether the end reached an operation that somebody waited for

    @property
    def alive(self) -> bool:
        """Whether operations can begin."""
        return self._reason is None and not self._ended

    @classmethod
    async def accept(
        cls,
        listener: socket.socket,
        secret: str | None = None,
        *,
        patience_s: float = 0.0,
    ) -> "AgentLink":
        """Take the first connection on ``listener``, and hear its hello as ``greet`` does. The caller closes the listener."""
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        return await cls.greet(connection, secret, patience_s=patience_s)

    @classmethod
    async def greet(
        cls,
        connection: socket.socket,
        secret: str | None = None,
        *,
        patience_s: float = 0.0,
        again: bool = False,
    ) -> "AgentLink":
        """Hear the hello of one who dialled. ProtocolError if that is none.

        The agent is told a ``secret``, and to wait ``patience_s`` for a host that went away; one that comes ``again``
        must know the secret. The caller bounds the time.
        """
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=wire.MAX_BODY)
        link = cls(reader, writer)
        try:
            await link._hello(secret, patience_s, again=again)
        except BaseException:
            writer.transport.abort()
            raise
        return link

    async def _hello(self, secret: str | None, patience_s: float, *, again: bool) -> None:
        try:
            header = await self._reader.readexactly(wire.HEADER.size)
            length, kind, op = wire.HEADER.unpack(header)
            if kind != wire.HELLO or op != 0 or length > MAX_RESULT_BYTES:
                raise ProtocolError("no hello")
            self.version, said = results.hello(await self._reader.readexactly(length))
            if again and (said is None or secret is None or not hmac.compare_digest(said, secret)):
                raise ProtocolError("a stranger")
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ProtocolError("the agent hung up") from error
        answer = {"protocol": self.version, "patience_s": patience_s, "secret": secret}
        self.post(wire.HELLO, 0, json.dumps(answer).encode())

    async def serve(self) -> str:
        """Receive until the connection ends or breaks; return why, in words for the user.

        What is under way waits for ``close``, so that the caller can find out a better reason.
        """
        try:
            await self._receive()
            reason = self.HUNG_UP
        except (ProtocolError, wire.FrameError) as error:
            reason = f"its agent broke the protocol ({error})"
        except OSError as error:
            reason = (
                self.HUNG_UP if isinstance(error, ConnectionError) else f"its connection failed ({error})"
            )
        except Exception as error:  # a rule that is checked nowhere: it must cost this sandbox and no other
            logger.error("a sandbox sent what the host failed over", extra={"error": type(error).__name__})
            reason = "its agent broke the protocol"
        self._ended = True
        self._writer.transport.abort()
        return self._reason or reason

    async def _receive(self) -> None:
        decoder = wire.Decoder()
        loop = asyncio.get_running_loop()
        frames, since = 0, loop.time()
        while data := await self._reader.read(wire.CHUNK):
            for kind, op, body in decoder.feed(data):
                operation = self._operations.get(op)
                if operation is None:
                    raise ProtocolError(f"operation {op} is not under way")
                operation.received(kind, body)
                if operation.ended.is_set():
                    del self._operations[op]
                frames += 1
                if frames >= _PACE_FRAMES:
                    await asyncio.sleep(max(0.0, since + _PACE_S - loop.time()))
                    frames, since = 0, loop.time()

    def begin(self, kind: int, spec: dict[str, Any], most_bytes: int) -> Operation:
        """Begin an operation that may return at most ``most_bytes`` of content per stream; then await ``flushed``.

        Raises SandboxBusy, SandboxLost, or OperationRefused (``too_long``) if the request exceeds a frame.
        """
        if self._reason is not None:
            raise self.lost()
        if len(self._operations) >= _MAX_OPERATIONS:
            raise SandboxBusy(
                f"This sandbox has {_MAX_OPERATIONS} operations under way already; wait for one."
            )
        body = json.dumps(spec).encode()
        if len(body) > wire.MAX_BODY:
            raise OperationRefused("too_long", f"The request is longer than {wire.MAX_BODY} bytes.")
        op, self._next_op = self._next_op, self._next_op + 1
        operation = Operation(self, op, results.asked(kind, spec), _CONTENT[kind], most_bytes)
        self._operations[op] = operation
        self.post(kind, op, body)
        return operation

    def forget(self, what: dict[str, Any]) -> None:
        """Let the agent forget a command by its ``name``, or those of attempts ``before`` one; what runs is killed."""
        self.post(wire.FORGET, 0, json.dumps(what).encode())

    def forget_soon(self, name: str) -> None:
        """Let the agent forget a command that has ended: with the next frame, which wakes it anyway, or after a while."""
        if not self._later:
            asyncio.get_running_loop().call_later(_SOON_S, self._send_later)
        self._later += wire.pack(wire.FORGET, 0, json.dumps({"name": name}).encode())

    def _send_later(self) -> None:
        later, self._later = self._later, b""
        if later and self._reason is None and not self._ended:
            self._writer.write(later)

    def post(self, kind: int, op: int, body: bytes = b"") -> None:
        """Send a small frame without waiting; an agent that stopped reading is broken."""
        if self._reason is None and not self._ended:
            frame = wire.pack(kind, op, body)
            if self._later:
                frame, self._later = self._later + frame, b""
            self._writer.write(frame)
            if self._writer.transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
                self.close("its agent stopped reading")

    async def send(self, kind: int, op: int, body: bytes = b"") -> None:
        """Send a frame when the agent has taken earlier ones; SandboxLost if it does not for 30 s."""
        self.post(kind, op, body)
        await self.flushed()

    async def flushed(self) -> None:
        """Wait until the agent has taken what was sent; SandboxLost if it does not for 30 s."""
        if self._ended:
            return  # the operation ends when the reason is known
        if self._writer.transport.get_write_buffer_size() <= wire.CHUNK:
            return  # drain would not wait for so little
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await self._writer.drain()
        except TimeoutError as error:
            self.close("its agent stopped reading")
            raise self.lost() from error
        except OSError:
            return  # the receiver sees the end as well

    def close(self, reason: str) -> None:
        """End the connection; everything under way fails with SandboxLost giving ``reason``."""
        if self._reason is None:
            self._reason = reason
        self._writer.transport.abort()
        for operation in self._operations.values():
            self.told_somebody |= not operation.discarding
            operation.end()
        self._operations.clear()

    def lost(self) -> SandboxLost:
        """The error for an operation that can no longer end."""
        return SandboxLost(f"The sandbox was lost: {self._reason or 'it ended'}.")

    def explain(self, reason: str) -> None:
        """Say why the sandbox ends, in place of what the connection will show; nothing new is begun from here on."""
        self._reason = reason


_CONTENT: dict[int, frozenset[int]] = {
    wire.EXEC: frozenset({wire.STDOUT, wire.STDERR}),
    wire.READ: frozenset({wire.DATA}),
    wire.WRITE: frozenset(),
    wire.FILES: frozenset({wire.DATA}),
    wire.PROCESS: frozenset({wire.DATA}),
}
