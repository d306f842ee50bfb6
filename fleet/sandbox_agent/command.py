"""EXEC: a command that lasts as long as its operation."""

from __future__ import annotations

import contextlib
import os
import time

from . import memory, wire
from .operation import Operation, seconds
from .spawn import set_size
from .streams import Input, Stream
from .tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent
    from .operation import Json

_LINGER_S = 0.2  # wait for output after the command itself ended: background processes hold the pipes


class Output(Stream):
    """One output stream of a command: kept up to its budget, then counted and dropped but for its end."""

    def __init__(self, command: Command, fd: int, kind: int, budget: int) -> None:
        self.command = command
        self.kind = kind
        self.budget = budget
        self.dropped = 0
        self.tail = b""
        super().__init__(command.agent, fd)

    @property
    def stalled(self) -> bool:
        """Whether output waits for credit from the host."""
        return self.open and self.room() <= 0

    def room(self) -> int:
        return wire.CHUNK if self.budget <= 0 else min(wire.CHUNK, self.budget, self.command.credit)

    def gathers(self) -> bool:
        return self.command.tree.status is None

    def take(self, data: bytes) -> None:
        if self.budget > 0:
            self.budget -= len(data)
            self.command.send(self.kind, data)
        else:
            self.dropped += len(data)
            self.tail = (self.tail + data)[-wire.TAIL :]

    @property
    def missing(self) -> int:
        """Bytes that nobody will see."""
        return self.dropped - len(self.tail)

    def remainder(self) -> bytes:
        """The marker and the end of a stream whose middle was dropped."""
        marker = f"\n[... {self.missing} bytes of output dropped ...]\n".encode() if self.missing else b""
        return marker + self.tail


class Command(Operation):
    """A process tree with its streams and its deadline."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.started = time.monotonic()
        self.deadline = self.started + seconds(spec["timeout_s"])
        self.timed_out = False
        self.linger_until: float | None = None
        budget = int(spec["output_bytes"])
        self.tree = Tree(agent, spec, merged=False)
        spawned = self.tree.spawned
        self.outputs = [Output(self, fd, kind, budget) for fd, kind in spawned.outputs]
        self.tree.streams += self.outputs
        self.terminal = spec.get("pty") is not None
        self.input = None if spawned.stdin is None else Input(agent, spawned.stdin, self.terminal, self.grant)

    def data(self, body: bytes) -> None:
        if self.input is None:
            self.grant(len(body))
        else:
            self.input.feed(body)

    def eof(self) -> None:
        if self.input is not None:
            self.input.end()

    def granted(self) -> None:
        for output in self.outputs:
            output.tick(time.monotonic())

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal and self.outputs[0].open:
            with contextlib.suppress(OSError):
                set_size(self.outputs[0].fd, rows, columns)

    def kill(self) -> None:
        self.tree.kill()

    def tick(self, now: float) -> float | None:
        """Apply deadline, kill ladder and pauses; end the command when nothing more is to come."""
        if now >= self.deadline and self.tree.status is None and self.tree.killed_at is None:
            self.timed_out = True
            self.tree.kill()
        due = [self.tree.climb(now), *(output.tick(now) for output in self.outputs)]
        if self.tree.unkillable:
            self._let_go()
            self.refuse("unkillable", self.tree.unkillable)
            return None
        if self.tree.killed_at is None and self.tree.status is None:
            due.append(self.deadline)
        if self.tree.ended and not any(output.stalled for output in self.outputs):
            if not any(output.open for output in self.outputs):
                self.linger_until = now
            elif self.linger_until is None:
                self.linger_until = now + _LINGER_S
            if now < self.linger_until:
                due.append(self.linger_until)
            elif self._finish(now):
                return None
        return min((at for at in due if at is not None), default=None)

    def _finish(self, now: float) -> bool:
        """End the operation, unless there is no credit yet for the end of its output."""
        rest = [output.remainder() for output in self.outputs]
        if sum(map(len, rest)) > self.credit:
            return False
        for output, end in zip(self.outputs, rest):  # noqa: B905 - Python 3.9
            if end:
                self.send(output.kind, end)
        self._let_go()
        status = self.tree.status
        assert status is not None
        out_of_memory = self.tree.out_of_memory
        self.done(
            {
                "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "timed_out": self.timed_out,
                "killed": self.tree.killed_at is not None,
                "kill_rung": self.tree.rung,
                "dropped_bytes": sum(output.missing for output in self.outputs),
                "out_of_memory": out_of_memory,
                "memory_limit_bytes": memory.limit_bytes() if out_of_memory else None,
                "memory_peak_bytes": memory.peak_bytes() if out_of_memory else None,
                "duration_ms": int((now - self.started) * 1000),
            }
        )
        return True

    def _let_go(self) -> None:
        if self.input is not None:
            self.input.close()
        for output in self.outputs:
            self.agent.abandon(output)  # a background process may hold it
