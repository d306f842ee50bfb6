"""The agent's ends of a process's streams."""

from __future__ import annotations

import abc
import os
import selectors
import time

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent

_SHORT_READ_PAUSE_S = 0.005  # a stream that trickles is read this often, which bounds frames per second
_SHORT_READ = wire.CHUNK // 16


class Stream(abc.ABC):
    """An output that is read as far as ``room`` says."""

    def __init__(self, agent: Agent, fd: int) -> None:
        self.agent = agent
        self.fd = fd
        self.open = True
        self.watched = False
        self.resume_at = 0.0
        self.watch()

    @abc.abstractmethod
    def room(self) -> int:
        """How many bytes may be read now; 0 stops the stream until somebody calls ``watch``."""

    @abc.abstractmethod
    def take(self, data: bytes) -> None:
        """Use what was read."""

    def gathers(self) -> bool:
        """Whether to wait a little after a short read, so that small pieces come together."""
        return True

    def watch(self) -> None:
        if self.open and not self.watched:
            self.agent.selector.register(self.fd, selectors.EVENT_READ, self._readable)
            self.watched = True

    def unwatch(self) -> None:
        if self.watched:
            self.agent.selector.unregister(self.fd)
            self.watched = False

    def close(self) -> None:
        self.unwatch()
        if self.open:
            self.open = False
            os.close(self.fd)

    def tick(self, now: float) -> float | None:
        """Go on after a pause; returns when that is."""
        if not self.open or self.watched or self.room() <= 0:
            return None
        if now < self.resume_at and self.gathers():
            return self.resume_at
        self.watch()
        return None

    def _readable(self, _mask: int) -> None:
        size = self.room()
        if size <= 0:
            self.unwatch()
            return
        try:
            data = os.read(self.fd, size)
        except BlockingIOError:
            return
        except OSError:  # a terminal that nobody holds any more
            data = b""
        if not data:
            self.close()
            return
        self.take(data)
        if len(data) < _SHORT_READ and self.gathers():
            self.unwatch()
            self.resume_at = time.monotonic() + _SHORT_READ_PAUSE_S


class Ring(Stream):
    """Output of a background process: the newest ``RING`` bytes, with offsets counted from its start.

    With ``hold`` nothing is lost: no more is taken than that, beyond what the reader is known to have.
    """

    def __init__(self, agent: Agent, fd: int, hold: bool) -> None:
        super().__init__(agent, fd)
        self.start = 0  # offset of the first byte that is kept
        self.kept = bytearray()
        self.hold = hold
        self.had = 0  # offset of what no reader is known to have

    @property
    def end(self) -> int:
        """Offset of the byte that comes next."""
        return self.start + len(self.kept)

    def room(self) -> int:
        return min(wire.CHUNK, wire.RING - (self.end - self.had)) if self.hold else wire.CHUNK

    def known(self, offset: int) -> None:
        """Somebody reads from ``offset``."""
        self.had = max(self.had, min(offset, self.end))

    def drain(self) -> None:
        """Take some of what an ended process has left on the way."""
        if self.open and self.room() > 0:
            self._readable(0)

    def take(self, data: bytes) -> None:
        self.kept += data
        if (beyond := len(self.kept) - wire.RING) > 0:
            del self.kept[:beyond]
            self.start += beyond

    def read(self, offset: int, limit: int) -> tuple[int, bytes]:
        """From ``offset``, or the oldest byte that is kept if that is later: where it begins, and the bytes."""
        begin = min(max(offset, self.start), self.end)
        return begin, bytes(self.kept[begin - self.start : begin - self.start + limit])


class Abandoned(Stream):
    """Output that nobody wants any more, read so that who writes it neither blocks nor gets SIGPIPE."""

    def room(self) -> int:
        return wire.CHUNK

    def take(self, data: bytes) -> None:
        pass

    def gathers(self) -> bool:
        return False

    def close(self) -> None:
        super().close()
        self.agent.abandoned.pop(self, None)


class Input:
    """A process's stdin, or its terminal's. ``written`` hears of bytes that were taken or that nobody will take."""

    def __init__(self, agent: Agent, fd: int, terminal: bool, written: Callable[[int], None]) -> None:
        self.written = written
        self.open = True
        self.lost = False  # whether something came that nobody took
        self._agent = agent
        self._fd = fd
        self._terminal = terminal
        self._buffer = bytearray()
        self._ending = False
        self._watched = False

    def feed(self, body: bytes) -> None:
        """More content; the caller's window bounds what waits here."""
        self._buffer += body
        self._write(0)

    def end(self) -> None:
        """No content follows. A terminal stays open, and is told as by Ctrl-D."""
        self._ending = True
        self._write(0)

    def drop(self) -> None:
        """Forget what waits."""
        self._buffer.clear()
        self._watch(False)

    def close(self) -> None:
        """Close it now; what waits is dropped."""
        if self.open:
            self.open = False
            self._watch(False)
            os.close(self._fd)
            self._lose()

    def _lose(self) -> None:
        """Give back what nobody will take."""
        size = len(self._buffer)
        if size:
            self.lost = True
            self._buffer.clear()
            self.written(size)

    def _write(self, _mask: int) -> None:
        size = 0
        try:
            while self.open and self._buffer:
                part = os.write(self._fd, self._buffer[: wire.CHUNK])
                del self._buffer[:part]
                size += part
            if self._ending and self.open and self._terminal:
                os.write(self._fd, b"\x04")
                self._ending = False
        except BlockingIOError:
            pass
        except OSError:  # the process does not read on
            self.close()
        if not self.open:
            self._lose()
        elif self._ending and not self._buffer:
            self.close()
        else:
            self._watch(bool(self._buffer))
        if size:
            self.written(size)

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._agent.selector.register(self._fd, selectors.EVENT_WRITE, self._write)
        elif self._watched and not wanted:
            self._agent.selector.unregister(self._fd)
        self._watched = wanted
