"""PID 1 of a sandbox: runs commands and moves files for the sandbox host, over one connection.

Started as ``python3 -I -S agent.py SOCKET [UID GID]``. It dials out to the unix socket, says hello, and then serves
many operations at once on that connection; when the connection ends it kills everything in the sandbox and exits.
The file is bound into images that are not ours, so it imports the standard library only and runs on Python 3.9.

A frame is ``body length (u32), kind (u8), operation (u32)``, big endian, then the body. Kinds and rules of the
protocol are in ``docs/sandbox-protocol.md``; the host uses this module's constants and ``Decoder``.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PROTOCOL = 1
HEADER = struct.Struct("!IBI")
MAX_BODY = 256 * 1024  # bytes; a longer frame is malformed
CHUNK = 64 * 1024  # bytes of content in one frame at most
WINDOW = 256 * 1024  # bytes that may be under way per operation and direction before the receiver grants more
MAX_OPERATIONS = 64  # at once on one connection

HELLO, EXEC, KILL, READ, WRITE, LIST, DATA, EOF, STDOUT, STDERR, CREDIT, DONE, FAIL = range(1, 14)

ROOTS = ("/workspace", "/tmp")  # noqa: S108 - the writable mounts of a sandbox, not a temporary file
MARK = "SANDFLEET_COMMAND"  # environment variable by which a command's daemons are found
TAIL = 4096  # bytes of a stream's end that are kept when its middle is dropped
SHORT_READ_PAUSE_S = 0.005  # a stream that trickles is read this often, which bounds frames per second
LINGER_S = 0.2  # wait for output after the command itself ended: background processes hold the pipes
TREE_KILL_S = 1.0  # how long the tree kill may take before everything in the sandbox is killed
UNKILLABLE_S = 3.0  # without any process dying: then the agent gives up and leaves the rest to the host
KILL_AT_MOST_S = 10.0  # the same, although some die: a sandbox short of memory and CPU dies slowly
MAX_ENTRIES = 10_000  # entries of one directory listing

Json = dict[str, Any]


class FrameError(Exception):
    """The peer sent something that is no frame."""


class Refused(Exception):
    """An operation that cannot be done: a stable code and a message for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


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
            if length > MAX_BODY or not HELLO <= kind <= FAIL:
                raise FrameError(f"kind {kind}, length {length}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield kind, op, body


class Operation:
    """What all operations share: an id, the credit to send to the host, and the agent they belong to."""

    def __init__(self, agent: Agent, op: int) -> None:
        self.agent = agent
        self.op = op
        self.credit = WINDOW

    def data(self, body: bytes) -> None:
        """Content from the host; only what takes content gets any."""

    def eof(self) -> None:
        """The end of the host's content."""

    def granted(self) -> None:
        """More credit arrived."""

    def tick(self, now: float) -> float | None:
        """Do what is due and return when to be called again, on the monotonic clock."""
        return None

    def kill(self) -> None:
        """Abandon the operation."""
        self.refuse("killed", "the operation was abandoned")

    def send(self, kind: int, body: bytes) -> None:
        self.credit -= len(body)
        self.agent.send(kind, self.op, body)

    def grant(self, size: int) -> None:
        self.agent.send(CREDIT, self.op, struct.pack("!I", size))

    def done(self, result: Json) -> None:
        self.agent.end(self, DONE, result)

    def refuse(self, code: str, message: str) -> None:
        self.agent.end(self, FAIL, {"code": code, "message": message[:1000]})


class Output:
    """One output stream of a command: kept up to its budget, then counted and dropped but for its end."""

    def __init__(self, command: Command, fd: int, kind: int, budget: int) -> None:
        self.command = command
        self.fd = fd
        self.kind = kind
        self.budget = budget
        self.dropped = 0
        self.tail = b""
        self.open = True
        self.watched = False
        self.resume_at = 0.0
        os.set_blocking(fd, False)
        self.watch()

    def watch(self) -> None:
        if self.open and not self.watched:
            self.agent.selector.register(self.fd, selectors.EVENT_READ, self.readable)
            self.watched = True

    def unwatch(self) -> None:
        if self.watched:
            self.agent.selector.unregister(self.fd)
            self.watched = False

    @property
    def agent(self) -> Agent:
        return self.command.agent

    @property
    def stalled(self) -> bool:
        """Whether output waits for credit from the host."""
        return self.open and self.budget > 0 and self.command.credit <= 0 and not self.command.over

    def readable(self, _mask: int) -> None:
        over = self.command.over
        if self.stalled:
            self.unwatch()
            return
        size = CHUNK if over or self.budget <= 0 else min(CHUNK, self.budget, self.command.credit)
        try:
            data = os.read(self.fd, size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        if over:
            return
        if self.budget > 0:
            self.budget -= len(data)
            self.command.send(self.kind, data)
        else:
            self.dropped += len(data)
            self.tail = (self.tail + data)[-TAIL:]
        if len(data) < CHUNK // 16 and self.command.status is None:
            self.unwatch()
            self.resume_at = time.monotonic() + SHORT_READ_PAUSE_S

    def close(self) -> None:
        self.unwatch()
        if self.open:
            self.open = False
            os.close(self.fd)
            self.agent.orphans.discard(self)

    def remainder(self) -> bytes:
        """The marker and the end of a stream whose middle was dropped."""
        if not self.dropped:
            return b""
        missing = self.dropped - len(self.tail)
        marker = f"\n[... {missing} bytes of output dropped ...]\n".encode() if missing else b""
        return marker + self.tail


class Command(Operation):
    """A process tree with its output streams, deadline and kill ladder."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.over = False
        self.status: int | None = None
        self.started = time.monotonic()
        self.deadline = self.started + float(spec["timeout_s"])
        self.timed_out = False
        self.linger_until: float | None = None
        self.kill_since: float | None = None
        self.kill_next = 0.0
        self.fewest = sys.maxsize  # living processes that a kill has met at least, and when it met so few
        self.fewest_at = 0.0
        self.tree_dead = False
        self.rung = 0
        self.oom_before = oom_kills()
        self.start_ticks = 0
        self.mark = f"{MARK}={op}-{os.urandom(6).hex()}"
        self.stdin: int | None = None
        self.stdin_watched = False
        self.stdin_eof = False
        self.stdin_buffer = bytearray()
        self.pid = self._spawn(spec)
        agent.mains[self.pid] = self

    def _spawn(self, spec: Json) -> int:
        argv = spec["argv"] if "argv" in spec else [shell(), "-c", spec["shell"]]
        environment = {**BASE_ENVIRONMENT, **spec.get("env", {})}
        name, _, value = self.mark.partition("=")
        environment[name] = value
        fds: list[int] = []
        try:
            for _ in range(3):
                fds += os.pipe2(os.O_CLOEXEC)
            if not spec.get("stdin", False):
                os.close(fds[1])
                fds[1] = -1
            process = subprocess.Popen(
                [os.fsencode(part) for part in argv],
                stdin=fds[0],
                stdout=fds[3],
                stderr=fds[5],
                cwd=spec.get("cwd") or ROOTS[0],
                env={os.fsencode(k): os.fsencode(v) for k, v in environment.items()},
                start_new_session=True,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            for fd in fds:
                if fd >= 0:
                    os.close(fd)
            raise Refused("cannot_start", f"the command cannot be started: {error}") from None
        process.returncode = 0  # reaped here by pid, never through this object
        for fd in (fds[0], fds[3], fds[5]):
            os.close(fd)
        with contextlib.suppress(OSError):
            self.start_ticks = Process(process.pid).start
        # When memory runs out the kernel takes a command first, and the agent last.
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
            file.write("1000")
        limit = int(spec["output_bytes"])
        self.outputs = [Output(self, fds[2], STDOUT, limit), Output(self, fds[4], STDERR, limit)]
        if fds[1] >= 0:
            os.set_blocking(fds[1], False)
            self.stdin = fds[1]
        return process.pid

    def data(self, body: bytes) -> None:
        if self.stdin is None:
            self.grant(len(body))
            return
        self.stdin_buffer += body
        self._feed(0)

    def eof(self) -> None:
        self.stdin_eof = True
        self._feed(0)

    def _feed(self, _mask: int) -> None:
        if self.stdin is None:
            return
        written = 0
        try:
            while self.stdin_buffer:
                size = os.write(self.stdin, self.stdin_buffer[:CHUNK])
                del self.stdin_buffer[:size]
                written += size
        except BlockingIOError:
            pass
        except OSError:  # the command does not read on
            written += len(self.stdin_buffer)
            self._close_stdin()
        if written:
            self.grant(written)
        if self.stdin is None:
            return
        if self.stdin_buffer and not self.stdin_watched:
            self.agent.selector.register(self.stdin, selectors.EVENT_WRITE, self._feed)
            self.stdin_watched = True
        elif not self.stdin_buffer and self.stdin_eof:
            self._close_stdin()
        elif not self.stdin_buffer and self.stdin_watched:
            self.agent.selector.unregister(self.stdin)
            self.stdin_watched = False

    def _close_stdin(self) -> None:
        if self.stdin is not None:
            if self.stdin_watched:
                self.agent.selector.unregister(self.stdin)
                self.stdin_watched = False
            os.close(self.stdin)
            self.stdin = None
            self.stdin_buffer.clear()

    def granted(self) -> None:
        for output in self.outputs:
            if not output.stalled and output.resume_at <= time.monotonic():
                output.watch()

    def kill(self) -> None:
        if self.kill_since is None:
            self.kill_since = self.kill_next = time.monotonic()

    def tick(self, now: float) -> float | None:
        """Apply deadline, kill ladder and pauses; end the command when nothing more is to come."""
        due = [self.deadline] if self.kill_since is None and self.status is None else []
        if due and now >= self.deadline:
            self.timed_out = True
            self.kill()
            due = []
        if self.kill_since is not None and not self.tree_dead:
            if now >= self.kill_next and not self._climb(now):
                return None
            if not self.tree_dead:
                due.append(self.kill_next)
        for output in self.outputs:
            if output.open and not output.watched and not output.stalled:
                if now >= output.resume_at or self.status is not None:
                    output.watch()
                else:
                    due.append(output.resume_at)
        if self.status is not None and (self.kill_since is None or self.tree_dead):
            if any(output.open for output in self.outputs):
                if any(output.stalled for output in self.outputs):
                    return min(due, default=None)
                if self.linger_until is None:
                    self.linger_until = now + LINGER_S
                if now < self.linger_until:
                    return min([*due, self.linger_until])
            if self._finish(now):
                return None
        return min(due, default=None)

    def _climb(self, now: float) -> bool:
        """One round of the kill ladder; False once the operation was given up."""
        assert self.kill_since is not None
        members, complete = process_tree(self)
        # Nothing forks away from the second rung, so after it any look will do.
        if not members and (complete or self.rung == 2) and self.status is not None:
            self.tree_dead = True
            return True
        self.rung = max(self.rung, 1)
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        spent = now - self.kill_since
        if spent > TREE_KILL_S:
            if self.rung < 2:
                self.rung, self.fewest = 2, sys.maxsize  # what forked away from the first rung does not count
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(-1, signal.SIGKILL)
        if len(members) < self.fewest:
            self.fewest, self.fewest_at = len(members), now
        if now - max(self.fewest_at, self.kill_since) > UNKILLABLE_S or spent > KILL_AT_MOST_S:
            self._let_go()
            memory = " after memory had run out" if oom_kills() > self.oom_before else ""
            self.refuse("unkillable", f"a command in it could not be killed{memory}")
            return False
        self.kill_next = now + (0.005 if spent < 0.05 else 0.05)
        return True

    def _finish(self, now: float) -> bool:
        rest = [output.remainder() for output in self.outputs]
        if sum(map(len, rest)) > self.credit:
            return False
        for output, end in zip(self.outputs, rest):  # noqa: B905 - Python 3.9
            if end:
                self.send(output.kind, end)
        self._let_go()
        assert self.status is not None
        code = os.WEXITSTATUS(self.status) if os.WIFEXITED(self.status) else None
        self.done(
            {
                "exit_code": code,
                "signal": os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else None,
                "timed_out": self.timed_out,
                "killed": self.kill_since is not None,
                "kill_rung": self.rung,
                "dropped_bytes": sum(max(0, o.dropped - len(o.tail)) for o in self.outputs),
                "out_of_memory": oom_kills() > self.oom_before,
                "duration_ms": int((now - self.started) * 1000),
            }
        )
        return True

    def _let_go(self) -> None:
        self.over = True
        self._close_stdin()
        for output in self.outputs:
            if output.open:  # held by a background process, which must neither block nor get SIGPIPE
                self.agent.adopt(output)


class ReadFile(Operation):
    """Content of one regular file, from an offset, at most ``limit`` bytes."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.fd = open_regular(confined(spec["path"]), os.O_RDONLY)
        try:
            self.size = os.fstat(self.fd).st_size
            os.lseek(self.fd, int(spec.get("offset", 0)), os.SEEK_SET)
        except OSError as error:
            os.close(self.fd)
            raise Refused("io_error", str(error)) from None
        self.left = int(spec["limit"])

    def tick(self, now: float) -> float | None:
        try:
            while self.credit > 0:
                data = os.read(self.fd, max(0, min(CHUNK, self.credit, self.left)))
                if not data:
                    os.close(self.fd)
                    self.done({"size": self.size})
                    return None
                self.left -= len(data)
                self.send(DATA, data)
        except OSError as error:
            os.close(self.fd)
            self.refuse("io_error", str(error))
        return None

    def kill(self) -> None:
        os.close(self.fd)
        super().kill()


class WriteFile(Operation):
    """A file replaced as a whole: written beside the target, renamed at the end."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.target = confined(spec["path"])
        if os.path.isdir(self.target):
            raise Refused("is_a_directory", f"{spec['path']} is a directory")
        self.part = f"{self.target[:200]}.{os.urandom(6).hex()}.part"
        self.size = 0
        try:
            os.makedirs(os.path.dirname(self.target), exist_ok=True)
            self.fd = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            mode = spec.get("mode")
            if mode is None:
                with contextlib.suppress(FileNotFoundError):
                    mode = stat.S_IMODE(os.stat(self.target).st_mode)
            if mode is not None:
                os.fchmod(self.fd, int(mode) & 0o777)
        except OSError as error:
            raise Refused(*explained(error, spec["path"])) from None

    def data(self, body: bytes) -> None:
        view = memoryview(body)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            self._drop()
            self.refuse(*explained(error, self.target))
            return
        self.size += len(body)
        self.grant(len(body))

    def eof(self) -> None:
        try:
            os.close(self.fd)
            os.replace(self.part, self.target)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(self.part)
            self.refuse(*explained(error, self.target))
            return
        self.done({"size": self.size})

    def kill(self) -> None:
        self._drop()
        super().kill()

    def _drop(self) -> None:
        os.close(self.fd)
        with contextlib.suppress(OSError):
            os.unlink(self.part)


class ListFiles(Operation):
    """Entries of one directory, a JSON object a line, names that are not UTF-8 with replacement characters."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        path = confined(spec["path"])
        try:
            with os.scandir(path) as found:
                entries = [entry for entry, _ in zip(found, range(MAX_ENTRIES + 1))]  # noqa: B905
        except OSError as error:
            raise Refused(*explained(error, spec["path"])) from None
        self.truncated = len(entries) > MAX_ENTRIES
        lines = [self._line(entry) for entry in sorted(entries[:MAX_ENTRIES], key=lambda e: e.name)]
        self.rest = memoryview(b"".join(lines))

    @staticmethod
    def _line(entry: os.DirEntry[str]) -> bytes:
        kind = "other"
        size, modified_s = 0, 0
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            size, modified_s = status.st_size, int(status.st_mtime)
            if stat.S_ISLNK(status.st_mode):
                kind = "symlink"
            elif stat.S_ISDIR(status.st_mode):
                kind = "directory"
            elif stat.S_ISREG(status.st_mode):
                kind = "file"
        name = os.fsencode(entry.name).decode("utf-8", "replace")
        line = {"name": name, "kind": kind, "size": size, "modified_s": modified_s}
        return json.dumps(line).encode() + b"\n"

    def tick(self, now: float) -> float | None:
        while self.rest and self.credit > 0:
            size = min(CHUNK, self.credit)
            self.send(DATA, bytes(self.rest[:size]))
            self.rest = self.rest[size:]
        if not self.rest:
            self.done({"truncated": self.truncated})
        return None


class Agent:
    """The event loop: one connection to the host, any number of operations, all children reaped."""

    def __init__(self, connection: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.operations: dict[int, Operation] = {}
        self.mains: dict[int, Command] = {}
        self.orphans: set[Output] = set()
        self._connection = connection
        self._decoder = Decoder()
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

    def serve(self) -> NoReturn:
        self.send(HELLO, 0, json.dumps({"protocol": PROTOCOL, "uid": os.getuid()}).encode())
        while True:
            now = time.monotonic()
            due = [at for op in list(self.operations.values()) if (at := op.tick(now)) is not None]
            self._flush()
            pause = None if not due else max(0.0, min(due) - time.monotonic())
            for key, mask in self.selector.select(pause):
                current = self.selector.get_map().get(key.fileobj)
                if current is not None and current.data == key.data:  # an earlier callback may have closed it
                    key.data(mask)
            self._reap()

    def send(self, kind: int, op: int, body: bytes) -> None:
        self._out += pack(kind, op, body)

    def end(self, operation: Operation, kind: int, result: Json) -> None:
        del self.operations[operation.op]
        self.send(kind, operation.op, json.dumps(result).encode())

    def adopt(self, output: Output) -> None:
        """Drain a stream that background processes of an ended command still hold, the newest 128 of them."""
        while len(self.orphans) >= 128:
            next(iter(self.orphans)).close()
        self.orphans.add(output)
        output.watch()

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
            command = self.mains.pop(pid, None)
            if command is not None:
                command.status = status

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                data = self._connection.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                leave(0)
            if not data:
                leave(0)
            for kind, op, body in self._decoder.feed(data):
                self._handle(kind, op, body)
        if mask & selectors.EVENT_WRITE:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._connection.send(self._out[:MAX_BODY])]
        except BlockingIOError:
            pass
        except OSError:
            leave(0)
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self.selector.modify(self._connection, events, self._ready)

    def _handle(self, kind: int, op: int, body: bytes) -> None:
        if kind in STARTERS:
            try:
                if len(self.operations) >= MAX_OPERATIONS:
                    raise Refused("busy", f"more than {MAX_OPERATIONS} operations at once")
                self.operations[op] = STARTERS[kind](self, op, json.loads(body))
            except Refused as refused:
                result = {"code": refused.code, "message": refused.message[:1000]}
                self.send(FAIL, op, json.dumps(result).encode())
            return
        operation = self.operations.get(op)
        if operation is None:  # it ended while the frame was under way
            return
        if kind == DATA:
            operation.data(body)
        elif kind == EOF:
            operation.eof()
        elif kind == KILL:
            operation.kill()
        elif kind == CREDIT:
            operation.credit += struct.unpack("!I", body)[0]
            operation.granted()


STARTERS: dict[int, Callable[[Agent, int, Json], Operation]] = {
    EXEC: Command,
    READ: ReadFile,
    WRITE: WriteFile,
    LIST: ListFiles,
}

BASE_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    "HOME": ROOTS[0],
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": ROOTS[1],
    "PYTHONDONTWRITEBYTECODE": "1",
}


def shell() -> str:
    return next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "/bin/sh")


def oom_kills() -> int:
    """Processes of this sandbox that the kernel killed for memory, by cgroup v2 or v1; 0 where neither tells."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def confined(path: str) -> str:
    """The real path behind ``path`` (relative ones start in /workspace), or Refused if it lies outside the roots."""
    if "\0" in path or not path:
        raise Refused("bad_path", "the path is empty or contains NUL")
    try:
        real = os.path.realpath(os.path.join(ROOTS[0], path))
    except (OSError, ValueError) as error:
        raise Refused("bad_path", str(error)) from None
    if not any(real == root or real.startswith(root + "/") for root in ROOTS):
        raise Refused("outside", f"{path} is outside of {' and '.join(ROOTS)}")
    return real


def open_regular(path: str, flags: int) -> int:
    """Open a regular file; never blocks on a pipe or a device that lies at the path."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise Refused(*explained(error, path)) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        os.close(fd)
        if is_directory:
            raise Refused("is_a_directory", f"{path} is a directory")
        raise Refused("not_a_file", f"{path} is not a regular file")
    return fd


def explained(error: OSError, path: str) -> tuple[str, str]:
    """The stable code and the message for an operating system error on ``path``."""
    codes = {
        "FileNotFoundError": "not_found",
        "NotADirectoryError": "not_a_directory",
        "IsADirectoryError": "is_a_directory",
        "PermissionError": "permission_denied",
    }
    return codes.get(type(error).__name__, "io_error"), f"{path}: {error.strerror or error}"


class Process:
    """What /proc says of a process: its parent, session, start (ticks since boot) and the mark in its environment."""

    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.dead = fields[0] in (b"Z", b"X")
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.start = int(fields[19])
        self.mark = b""
        if not self.dead:
            with contextlib.suppress(PermissionError), open(f"/proc/{pid}/environ", "rb") as file:
                prefix = MARK.encode() + b"="
                self.mark = next((part for part in file.read().split(b"\0") if part.startswith(prefix)), b"")

    def holds(self, pipes: set[str]) -> bool:
        with contextlib.suppress(OSError):
            return any(os.readlink(fd.path) in pipes for fd in os.scandir(f"/proc/{self.pid}/fd"))
        return False


def process_tree(command: Command) -> tuple[set[int], bool]:
    """Living processes of a command, and whether the look was complete: none ended, and maybe forked, meanwhile.

    To a command belong its session, what carries its mark or holds its pipes, orphans without any mark that began
    after it, and all descendants of these.
    """
    processes: dict[int, Process] = {}
    complete = True
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                process = Process(int(name))
            except (FileNotFoundError, ProcessLookupError):
                complete = False
                continue
            if not process.dead:
                processes[process.pid] = process
    mains = command.agent.mains
    session_is_ours = command.status is None or command.pid not in mains
    pipes = {f"pipe:[{os.fstat(output.fd).st_ino}]" for output in command.outputs if output.open}
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
        lost = not process.mark and process.parent not in processes and process.pid not in mains
        if (
            (session_is_ours and process.session == command.pid)
            or process.mark == command.mark.encode()
            or (lost and process.start >= command.start_ticks)
            or (pipes and process.holds(pipes))
        ):
            found.append(process.pid)
    tree: set[int] = set()
    while found:
        pid = found.pop()
        if pid not in tree:
            tree.add(pid)
            found += children.get(pid, [])
    return tree, complete


def leave(code: int) -> NoReturn:
    """Kill everything in the sandbox and end it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
    os._exit(code)


def main(arguments: list[str]) -> NoReturn:
    """Connect, drop to the given user, serve until the host hangs up."""
    os.umask(0o022)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(arguments[0])
    if len(arguments) > 1:
        os.setgroups([])
        os.setgid(int(arguments[2]))
        os.setuid(int(arguments[1]))
    Agent(connection).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
