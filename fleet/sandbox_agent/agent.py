"""The event loop of PID 1: one connection to the host, any number of operations, all children reaped."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import time

from . import wire
from .background import Background, process_work
from .command import exec_command
from .content import ReadFile, WriteFile
from .file_work import file_work
from .operation import BAD_REQUEST, Operation, Refused, seconds
from .streams import Abandoned, Stream
from .tree import Tree, kill_everything, session_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn, Protocol

    from .command import Command
    from .operation import Json

    class Main(Protocol):
        """What started a process and wants its wait status."""

        status: int | None


_MAX_ABANDONED = 128
_REDIAL_EVERY_S = 0.2
# Unread by the host. Content has windows, so only a host that asks without end and never reads gets here.
_MAX_BACKLOG = 2 * wire.MAX_OPERATIONS * wire.WINDOW

HOST_LEFT, HOST_BROKE_PROTOCOL = 0, 3  # exit statuses


class Broken(Exception):
    """The host broke a rule of the protocol."""


class Agent:
    """Serves one host until it is gone for longer than it has told the agent to wait; then everything ends."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.operations: dict[int, Operation] = {}  # those of a lost connection have numbers below 0
        self.commands: dict[str, Command] = {}  # those with a name, oldest first
        self.processes: dict[int, Background] = {}
        self.last_process = 0
        self.mains: dict[int, Main] = {}
        self.victims = 0  # large processes of commands that the kernel was seen to kill for memory
        self.large = 0  # commands that ended with a large process of theirs, after a kill that nobody saw
        self.abandoned: dict[Abandoned, None] = {}  # oldest first
        self._address = address
        self._connection: socket.socket | None = None
        self._patience_s = 0.0  # how long to wait for a host that went away
        self._secret: str | None = None  # by which the host knows this agent again
        self._gone_at = self._redial_at = 0.0
        self._last_parked = 0
        self._connect(connection)
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

    def _connect(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = wire.Decoder()
        self._greeted = False
        self._out = bytearray()
        self._writing = False
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, self._ready)

    def _hang_up(self) -> None:
        """The host is gone. What has no name ends; the rest waits for it to come back."""
        if self._patience_s <= 0:
            leave(HOST_LEFT)
        assert self._connection is not None
        self.selector.unregister(self._connection)
        self._connection.close()
        self._connection = None
        self._out.clear()
        self._gone_at = self._redial_at = time.monotonic()
        for operation in list(self.operations.values()):
            del self.operations[operation.op]
            self.park(operation)
            operation.detach()

    def park(self, operation: Operation) -> None:
        """Keep an operation that nobody hears of until it has ended."""
        self._last_parked -= 1
        operation.op = self._last_parked
        self.operations[operation.op] = operation

    def _redial(self, now: float) -> float | None:
        """Look for the host; returns when to look again, None when it is there."""
        if self._connection is not None:
            return None
        if now > self._gone_at + self._patience_s:
            leave(HOST_LEFT)
        if now >= self._redial_at:
            self._redial_at = now + _REDIAL_EVERY_S
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._address)
            except OSError:
                connection.close()
            else:
                self._connect(connection)
                self._say_hello()
                return None
        return self._redial_at

    def follows(self, operation: Operation) -> bool:
        """Whether it is among the operations under way."""
        return self.operations.get(operation.op) is operation

    def _say_hello(self) -> None:
        hello = {"newest": wire.NEWEST, "oldest": wire.OLDEST, "uid": os.getuid(), "secret": self._secret}
        self.send(wire.HELLO, 0, json.dumps(hello).encode())

    def serve(self) -> NoReturn:
        """Say hello and serve."""
        self._say_hello()
        while True:
            now = time.monotonic()
            # Processes first: operations wait for what becomes of them.
            named = [command for command in self.commands.values() if not self.follows(command)]
            parts: list[Operation | Background] = [
                *self.processes.values(),
                *self.operations.values(),
                *named,
            ]
            due = [at for part in parts if (at := part.tick(now)) is not None]
            if (redial_at := self._redial(now)) is not None:
                due.append(redial_at)
            self._flush()
            pause = None if not due else max(0.0, min(due) - time.monotonic())
            for key, mask in self.selector.select(pause):
                current = self.selector.get_map().get(key.fileobj)
                if current is not None and current.data == key.data:  # an earlier callback may have closed it
                    key.data(mask)
            self._reap()

    def send(self, kind: int, op: int, body: bytes) -> None:
        """Queue a frame for the host; nobody waits for those of a lost connection."""
        if op >= 0 and self._connection is not None:
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
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            main = self.mains.get(pid)
            owner = main if main is not None else self.mains.get(session_of(pid))
            _, status, used = os.wait4(pid, 0)
            self.mains.pop(pid, None)
            if isinstance(owner, Tree):
                owner.reaped(pid, status, used.ru_maxrss * 1024)
            elif main is not None:
                main.status = status

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            assert self._connection is not None
            try:
                data = self._connection.recv(wire.CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            try:
                for kind, op, body in self._decoder.feed(data):
                    self._handle(kind, op, body)
            except (wire.FrameError, Broken):
                leave(HOST_BROKE_PROTOCOL)
        if mask & selectors.EVENT_WRITE:
            self._flush()

    def _flush(self) -> None:
        if self._connection is None:
            return
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[: wire.MAX_BODY])]
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return
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
        elif kind == wire.FORGET:
            self._forget(body)
        elif kind in _FOLLOWERS:
            operation = self.operations.get(op)
            if operation is not None:  # else it ended while the frame was under way
                _FOLLOWERS[kind](operation, body)
        else:
            raise Broken(f"kind {kind} from the host")

    def _greet(self, kind: int, op: int, body: bytes) -> None:
        try:
            found = json.loads(body.decode())
            version = found["protocol"]
            patience_s, secret = seconds(found.get("patience_s", 0)), found.get("secret")
        except BAD_REQUEST:
            raise Broken("no hello") from None
        if kind != wire.HELLO or op != 0 or version not in range(wire.OLDEST, wire.NEWEST + 1):
            raise Broken("no hello of a version that was offered")
        self._greeted = True
        self._patience_s, self._secret = patience_s, None if secret is None else str(secret)

    def _forget(self, body: bytes) -> None:
        """The host needs no command of this name any more, or none of attempts before one."""
        try:
            found = json.loads(body.decode())
            name, before = found.get("name"), int(found.get("before", 0))
        except BAD_REQUEST:
            raise Broken("nothing to forget") from None
        for command in list(self.commands.values()):
            if command.name == name or command.attempt < before:
                command.forget()

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
    wire.EXEC: exec_command,
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
