"""EXEC: a command that lasts as long as its operation."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from . import memory, wire
from .operation import Operation, Refused, seconds
from .spawn import set_size
from .streams import Input, Stream
from .tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent
    from .operation import Json

_MAX_NAME = 100
_LINGER_S = 0.2  # wait for output after the command itself ended: background processes hold the pipes


class Output(Stream):
    """One output stream of a command: kept up to its budget, then counted and dropped but for its end.

    What was kept is sent as the host grants credit. If the command has a name it stays, until the host needs it no more.
    """

    def __init__(self, command: Command, fd: int, kind: int, budget: int) -> None:
        self.command = command
        self.kind = kind
        self.budget = budget
        self.dropped = 0
        self.tail = b""
        self.kept = bytearray()
        self.sent = 0  # of ``kept``
        super().__init__(command.agent, fd)

    @property
    def waits(self) -> bool:
        """Whether output waits for credit from the host."""
        return self.sent < len(self.kept) or (self.open and self.room() <= 0)

    def room(self) -> int:
        if self.budget <= 0:
            return wire.CHUNK
        unsent = len(self.kept) - self.sent
        return min(wire.CHUNK, self.budget, max(self.command.credit, wire.CHUNK) - unsent)

    def gathers(self) -> bool:
        return self.command.tree.status is None

    def take(self, data: bytes) -> None:
        if self.budget > 0:
            self.budget -= len(data)
            self.kept += data
            self.pump()
        else:
            self.dropped += len(data)
            self.tail = (self.tail + data)[-wire.TAIL :]

    def pump(self) -> None:
        """Send as much as there is credit for."""
        with memoryview(self.kept) as kept:
            rest = self.command.send_some(self.kind, kept[self.sent :])
            self.sent = len(self.kept) - len(rest)
            rest.release()
        if self.command.name is None:
            del self.kept[: self.sent]
            self.sent = 0

    def again_from(self, offset: int) -> None:
        """Send from this offset on: so much has the host."""
        if not 0 <= offset <= len(self.kept):
            raise Refused("bad_request", "an offset beyond the output")
        self.sent = offset

    @property
    def missing(self) -> int:
        """Bytes that nobody will see."""
        return self.dropped - len(self.tail)

    def end(self) -> None:
        """Nothing more is read: the marker and the end of a stream whose middle was dropped follow what was kept."""
        marker = f"\n[... {self.missing} bytes of output dropped ...]\n".encode() if self.missing else b""
        self.kept += marker + self.tail
        self.agent.abandon(self)  # a background process may hold it
        self.pump()


class Command(Operation):
    """A process tree with its streams and its deadline."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        self.name: str | None = spec.get("name")
        self.attempt = int(spec.get("attempt", 0))
        self.all_came = False  # of its input
        self.result: Json | None = None  # known once it has ended
        self.failure: tuple[str, str] | None = None
        self.expires_at: float | None = None  # when nobody may come back for it any more
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
        self.all_came = True
        if self.input is not None:
            self.input.end()

    def granted(self) -> None:
        for output in self.outputs:
            output.pump()
            output.tick(time.monotonic())

    def detach(self) -> None:
        if self.name is not None and self.input is not None and not self.all_came:
            self.forget()  # it would take what it got for all of its input
        elif self.name is None:
            super().detach()
        else:
            del self.agent.operations[self.op]
            self.credit = 0
            self.expires_at = time.monotonic() + wire.RESUME_S

    def resume(self, op: int, offsets: Json) -> Operation:
        """Go on under another number: the host has so much of each stream."""
        if self.agent.follows(self):
            raise Refused("busy", "somebody follows this command")
        for output, stream in zip(self.outputs, ("stdout", "stderr")):  # noqa: B905 - Python 3.9
            output.again_from(int(offsets[stream]))
        self.op, self.credit, self.window = op, wire.WINDOW, wire.WINDOW
        self.expires_at = None
        for output in self.outputs:
            output.pump()
        return self

    def forget(self) -> None:
        """Nobody will ask for it; what still runs of it is killed."""
        if self.name is not None:
            self.agent.commands.pop(self.name, None)
            self.name = None
        if self.result is None and self.failure is None:
            if not self.agent.follows(self):
                self.agent.park(self)
            if self.op < 0:
                self.credit = sys.maxsize  # what it sends is dropped
            self.kill()

    def resize(self, rows: int, columns: int) -> None:
        if self.terminal and self.outputs[0].open:
            with contextlib.suppress(OSError):
                set_size(self.outputs[0].fd, rows, columns)

    def kill(self) -> None:
        self.tree.kill()

    def tick(self, now: float) -> float | None:
        """Apply deadline, kill ladder and pauses; end the command when nothing more is to come."""
        if self.result is not None or self.failure is not None:
            return self._tell(now)
        if now >= self.deadline and self.tree.status is None and self.tree.killed_at is None:
            self.timed_out = True
            self.tree.kill()
        due = [self.tree.climb(now), *(output.tick(now) for output in self.outputs)]
        if self.expires_at is not None:
            if now >= self.expires_at:
                self.forget()
            else:
                due.append(self.expires_at)
        if self.tree.unkillable:
            self._let_go()
            self.failure = ("unkillable", self.tree.unkillable)
            return self._tell(now)
        if self.tree.killed_at is None and self.tree.status is None:
            due.append(self.deadline)
        if self.tree.ended and not any(output.open and output.room() <= 0 for output in self.outputs):
            if not any(output.open for output in self.outputs):
                self.linger_until = now
            elif self.linger_until is None:
                self.linger_until = now + _LINGER_S
            if now < self.linger_until:
                due.append(self.linger_until)
            else:
                self._finish(now)
                return self._tell(now)
        return min((at for at in due if at is not None), default=None)

    def _finish(self, now: float) -> None:
        self._let_go()
        status = self.tree.status
        assert status is not None
        out_of_memory = self.tree.out_of_memory
        self.result = {
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

    def _tell(self, now: float) -> float | None:
        """Say how it ended, once the host has all output. A command with a name is kept until it is forgotten."""
        if self.agent.follows(self):
            if self.failure is None and any(output.waits for output in self.outputs):
                return None  # until there is credit
            self.expires_at = now + wire.RESUME_S
            if self.failure is not None:
                self.refuse(*self.failure)
            else:
                assert self.result is not None
                self.done(self.result)
        if self.name is not None and self.expires_at is not None:
            if now < self.expires_at:
                return self.expires_at
            self.forget()
        return None

    def _let_go(self) -> None:
        if self.input is not None:
            self.input.close()
        for output in self.outputs:
            output.end()


def exec_command(agent: Agent, op: int, spec: Json) -> Operation:
    """A new command, or, by its name, one that runs or has ended already. With ``resume`` (offsets) only the latter."""
    name, offsets = spec.get("name"), spec.get("resume")
    known = agent.commands.get(name) if name is not None else None
    if known is not None:
        return known.resume(op, offsets or {"stdout": 0, "stderr": 0})
    if offsets is not None:
        raise Refused(
            "no_command", "there is no command of this name: it ended, or was killed, some time ago"
        )
    if name is not None and (not isinstance(name, str) or len(name) > _MAX_NAME):
        raise Refused("bad_request", "a name has 100 characters at most")
    command = Command(agent, op, spec)
    if name is not None:
        ended = [each for each in agent.commands.values() if each.result is not None]
        for each in ended[: max(0, len(agent.commands) - wire.REMEMBERED + 1)]:
            each.forget()
        agent.commands[name] = command
    return command
