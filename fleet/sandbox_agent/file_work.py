"""FILES: looking for files and rearranging them, without holding up the agent.

What may take long runs in a forked process, so that a pattern that never ends, a tree of a million files or a full
memory cost that process and not PID 1. It writes frames to a pipe, which the agent reads as fast as the host takes
them, and is killed at its time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time

from . import arrange, search, wire
from .operation import BAD_REQUEST, Operation, Refused, seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from typing import NoReturn

    from .agent import Agent
    from .operation import Json

    Work = Callable[[Json], Generator[bytes, None, Json]]

_QUICK: dict[str, Work] = {"stat": arrange.status, "mkdir": arrange.make_directory}
_SEARCHES: dict[str, Work] = {"list": search.list_directory, "glob": search.glob, "grep": search.grep}
_CHANGES: dict[str, Work] = {"move": arrange.move, "copy": arrange.copy, "remove": arrange.remove}
_FLUSH_BYTES, _FLUSH_S = 16 * 1024, 0.1  # what was found is handed on at one of these, in case time runs out


def file_work(agent: Agent, op: int, spec: Json) -> Operation:
    """The operation for a FILES request; ``do`` says which."""
    return Quick(agent, op, spec) if spec["do"] in _QUICK else FileWork(agent, op, spec)


class Quick(Operation):
    """What takes no time: done by the agent itself."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.result: Json = _drained(_QUICK[spec["do"]](spec))

    def tick(self, now: float) -> float | None:
        self.done(self.result)
        return None


class FileWork(Operation):
    """A look or a change in a process of its own."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.status: int | None = None
        self.search = spec["do"] in _SEARCHES
        work = (_SEARCHES.get(spec["do"]) or _CHANGES[spec["do"]])(spec)
        self.deadline = time.monotonic() + seconds(spec["timeout_s"])
        self.decoder = wire.Decoder()
        self.content = memoryview(b"")
        self.frames: Iterator[tuple[int, int, bytes]] = iter(())
        self.over = False
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise Refused("cannot_start", f"no process can be started: {error.strerror}") from None
        if self.pid == 0:
            _work(writer, work)
        os.close(writer)
        os.set_blocking(reader, False)
        self.fd = reader
        self.watched = False
        agent.mains[self.pid] = self

    def tick(self, now: float) -> float | None:
        if now >= self.deadline:
            self._stop()
            if self.search:
                self.done({"truncated": True, "timed_out": True})
            else:
                self.refuse("timed_out", "it took too long, and was broken off in the middle")
            return None
        self._forward()
        if not self.over and not self.content and not self.watched:
            self.agent.selector.register(self.fd, selectors.EVENT_READ, self._readable)
            self.watched = True
        return None if self.over else self.deadline

    def _readable(self, _mask: int) -> None:
        try:
            data = os.read(self.fd, wire.CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop()
            self.refuse("killed", "its process was killed: the sandbox may be out of memory")
            return
        self.frames = self.decoder.feed(data)
        self._forward()

    def _forward(self) -> None:
        """Send on what was read, as far as there is credit; read nothing more until then."""
        while not self.over:
            self.content = self.send_some(wire.DATA, self.content)
            if self.content:
                self._unwatch()
                return
            try:
                frame = next(self.frames, None)
            except wire.FrameError:  # another process wrote to the pipe
                self._stop()
                self.refuse("killed", "its process sent nonsense")
                return
            if frame is None:
                return
            kind, _, body = frame
            if kind == wire.DATA:
                self.content = memoryview(body)
                continue
            self._stop()
            try:
                result = dict(json.loads(body.decode()))
            except (ValueError, TypeError, RecursionError):
                result, kind = {"code": "killed", "message": "its process sent nonsense"}, wire.FAIL
            self.agent.end(self, wire.DONE if kind == wire.DONE else wire.FAIL, result)

    def kill(self) -> None:
        self._stop()
        super().kill()

    def _stop(self) -> None:
        self.over = True
        self._unwatch()
        os.close(self.fd)
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _unwatch(self) -> None:
        if self.watched:
            self.agent.selector.unregister(self.fd)
            self.watched = False


def _drained(work: Generator[bytes, None, Json]) -> Json:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return dict(end.value)


def _work(writer: int, work: Generator[bytes, None, Json]) -> NoReturn:
    """What the forked process does: it leaves by ``_exit`` whatever happens, or it would go on as a second agent."""
    try:
        _become_worker(writer)
        _send(writer, work)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _become_worker(writer: int) -> None:
    """Let go of all that is the agent's: its connection to the host before all."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != writer:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.nice(5)


def _send(writer: int, work: Generator[bytes, None, Json]) -> None:
    lines, total = bytearray(), 0
    flush_at = time.monotonic() + _FLUSH_S
    try:
        while True:
            try:
                found = next(work)
            except StopIteration as end:
                kind, result = wire.DONE, dict(end.value)
                break
            total += len(found)
            if total > wire.MAX_LINES_BYTES:
                kind, result = wire.DONE, {"truncated": True, "timed_out": False}
                break
            lines += found
            if len(lines) >= _FLUSH_BYTES or time.monotonic() >= flush_at:
                _write(writer, wire.DATA, bytes(lines))
                lines.clear()
                flush_at = time.monotonic() + _FLUSH_S
    except Refused as refused:
        kind, result = wire.FAIL, {"code": refused.code, "message": refused.message[:1000]}
    except OSError as error:
        kind, result = wire.FAIL, {"code": "io_error", "message": str(error)[:1000]}
    except BAD_REQUEST as error:
        kind, result = (
            wire.FAIL,
            {"code": "bad_request", "message": f"{type(error).__name__}: {error}"[:1000]},
        )
    if lines:
        _write(writer, wire.DATA, bytes(lines))
    _write(writer, kind, json.dumps(result).encode())


def _write(fd: int, kind: int, body: bytes) -> None:
    frame = memoryview(wire.pack(kind, 0, body))
    while frame:
        frame = frame[os.write(fd, frame) :]
