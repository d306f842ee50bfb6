"""The event loop of PID 1: one connection to the host, any number of operations, all children reaped."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import time

from . import wire
from .background import Background, process_work
from .command import Command
from .content import ReadFile, WriteFile
from .file_work import file_work
from .operation import BAD_REQUEST, Operation, Refused
from .streams import Abandoned, Stream
from .tree import kill_everything

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import NoReturn, Protocol

    from .operation import Json

    class Main(Protocol):
        """What started a process and wants its wait status."""

        status: int | None


_MAX_ABANDONED = 128
# Unread by the host. Content has windows, so only a host that asks without end and never reads gets here.
_MAX_BACKLOG = 2 * wire.MAX_OPERATIONS * wire.WINDOW

HOST_LEFT, HOST_BROKE_PROTOCOL = 0, 3  # exit statuses


class Broken(Exception):
    """The host broke a rule of the protocol."""


class Agent:
    """Serves one host until it hangs up; then everything in the sandbox ends."""

    def __init__(self, connection: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.operations: dict[int, Operation] = {}
        self.processes: dict[int, Background] = {}
        self.last_process = 0
        self.mains: dict[int, Main] = {}
        self.abandoned: dict[Abandoned, None] = {}  # oldest first
        self._connection = connection
        self._decoder = wire.Decoder()
        self._greeted = False
        self._out = bytearray()
        self._writing = False
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, self._ready)
        self._wake, wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.selector.register(self._wake, selectors.EVENT_READ, self._woken)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A command may signal PID 1, which the kernel drops unless there is a handler, as Python has for SIGINT.
        # To ignore it instead would be inherited by all commands.
        signal.signal(signal.SIGINT, lambda *_: None)
        # Without a container they come from whoever started the host: nohup and a shell's background ignore some.
        for number in (signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)

    def serve(self) -> NoReturn:
        """Say hello and serve."""
        hello = {"newest": wire.NEWEST, "oldest": wire.OLDEST, "uid": os.getuid()}
        self.send(wire.HELLO, 0, json.dumps(hello).encode())
        while True:
            now = time.monotonic()
            # Processes first: operations wait for what becomes of them.
            parts: list[Operation | Background] = [*self.processes.values(), *self.operations.values()]
            due = [at for part in parts if (at := part.tick(now)) is not None]
            self._flush()
            pause = None if not due else max(0.0, min(due) - time.monotonic())
            for key, mask in self.selector.select(pause):
                current = self.selector.get_map().get(key.fileobj)
                if current is not None and current.data == key.data:  # an earlier callback may have closed it
                    key.data(mask)
            self._reap()

    def send(self, kind: int, op: int, body: bytes) -> None:
        """Queue a frame for the host."""
        self._out += wire.pack(kind, op, body)

    def end(self, operation: Operation, kind: int, result: Json) -> None:
        """Send an operation's end and forget it."""
        del self.operations[operation.op]
        self.send(kind, operation.op, json.dumps(result).encode())

    def abandon(self, stream: Stream) -> None:
        """Drain a stream that processes of an ended command may still hold, the newest 128 of them."""
        stream.unwatch()
        if stream.open:
            stream.open = False
            while len(self.abandoned) >= _MAX_ABANDONED:
                next(iter(self.abandoned)).close()
            self.abandoned[Abandoned(self, stream.fd)] = None

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            main = self.mains.pop(pid, None)
            if main is not None:
                main.status = status

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                data = self._connection.recv(wire.CHUNK)
            except BlockingIOError:
                return
            except OSError:
                leave(HOST_LEFT)
            if not data:
                leave(HOST_LEFT)
            try:
                for kind, op, body in self._decoder.feed(data):
                    self._handle(kind, op, body)
            except (wire.FrameError, Broken):
                leave(HOST_BROKE_PROTOCOL)
        if mask & selectors.EVENT_WRITE:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[: wire.MAX_BODY])]
        except BlockingIOError:
            pass
        except OSError:
            leave(HOST_LEFT)
        if len(self._out) > _MAX_BACKLOG:
            leave(HOST_BROKE_PROTOCOL)
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self.selector.modify(self._connection, events, self._ready)

    def _handle(self, kind: int, op: int, body: bytes) -> None:
        if not self._greeted:
            self._greet(kind, op, body)
        elif kind in _STARTERS:
            if op in self.operations:
                raise Broken("an operation begins twice")
            self._start(kind, op, body)
        elif kind in _FOLLOWERS:
            operation = self.operations.get(op)
            if operation is not None:  # else it ended while the frame was under way
                _FOLLOWERS[kind](operation, body)
        else:
            raise Broken(f"kind {kind} from the host")

    def _greet(self, kind: int, op: int, body: bytes) -> None:
        try:
            version = json.loads(body.decode())["protocol"]
        except BAD_REQUEST:
            raise Broken("no hello") from None
        if kind != wire.HELLO or op != 0 or version not in range(wire.OLDEST, wire.NEWEST + 1):
            raise Broken("no hello of a version that was offered")
        self._greeted = True

    def _start(self, kind: int, op: int, body: bytes) -> None:
        try:
            if len(self.operations) >= wire.MAX_OPERATIONS:
                raise Refused("busy", f"more than {wire.MAX_OPERATIONS} operations at once")
            self.operations[op] = _STARTERS[kind](self, op, json.loads(body.decode()))
            return
        except Refused as refused:
            result = {"code": refused.code, "message": refused.message[:1000]}
        except BAD_REQUEST as error:
            result = {"code": "bad_request", "message": f"{type(error).__name__}: {error}"[:1000]}
        except OSError as error:  # no descriptors, no processes, no memory
            result = {"code": "io_error", "message": str(error)[:1000]}
        self.send(wire.FAIL, op, json.dumps(result).encode())


def _data(operation: Operation, body: bytes) -> None:
    operation.window -= len(body)
    if operation.window < 0:
        raise Broken("content beyond the window")
    operation.data(body)


def _credit(operation: Operation, body: bytes) -> None:
    try:
        (size,) = wire.CREDIT_BODY.unpack(body)
    except struct.error:
        raise Broken("credit of the wrong size") from None
    operation.credit += size
    if operation.credit > wire.WINDOW:
        raise Broken("credit that was never used")
    operation.granted()


def _resize(operation: Operation, body: bytes) -> None:
    try:
        rows, columns = wire.RESIZE_BODY.unpack(body)
    except struct.error:
        raise Broken("a size that is none") from None
    operation.resize(rows, columns)


_STARTERS: dict[int, Callable[[Agent, int, Json], Operation]] = {
    wire.EXEC: Command,
    wire.READ: ReadFile,
    wire.WRITE: WriteFile,
    wire.FILES: file_work,
    wire.PROCESS: process_work,
}
_FOLLOWERS: dict[int, Callable[[Operation, bytes], None]] = {
    wire.DATA: _data,
    wire.EOF: lambda operation, _: operation.eof(),
    wire.KILL: lambda operation, _: operation.kill(),
    wire.CREDIT: _credit,
    wire.RESIZE: _resize,
}


def leave(code: int) -> NoReturn:
    """Kill everything in the sandbox and end it."""
    kill_everything()
    os._exit(code)
