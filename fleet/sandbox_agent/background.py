"""PROCESS: background processes, which outlive the operation that starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from . import wire
from .operation import Operation, Refused, seconds
from .spawn import set_size
from .streams import Input, Ring
from .tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent
    from .operation import Json

_SHOWN_CHARS = 400  # of a command in the list of processes


class Background:
    """One background process with the newest of its output, stdout and stderr in one."""

    def __init__(self, agent: Agent, number: int, spec: Json) -> None:
        self.agent = agent
        self.number = number
        self.started = time.monotonic()
        command = spec["argv"] if "argv" in spec else [spec["shell"]]
        self.shown = " ".join(map(str, command))[:_SHOWN_CHARS]
        self.tree = Tree(agent, spec, merged=True)
        spawned = self.tree.spawned
        self.ring = Ring(agent, spawned.outputs[0][0], bool(spec.get("hold")))
        self.tree.streams.append(self.ring)
        self.terminal = spec.get("pty") is not None
        self.input = (
            None if spawned.stdin is None else Input(agent, spawned.stdin, self.terminal, self._written)
        )
        self.writer: WriteProcess | None = None

    def _written(self, size: int) -> None:
        if self.writer is not None:
            self.writer.taken(size)

    def tick(self, now: float) -> float | None:
        """Go on with what is due; returns when to be called again."""
        if self.tree.ended and self.input is not None:
            self.input.close()
        due = [self.tree.climb(now), self.ring.tick(now)]
        return min((at for at in due if at is not None), default=None)

    @property
    def running(self) -> bool:
        """Whether its first process runs, or what it started is still being killed."""
        return not self.tree.ended

    def state(self) -> Json:
        """What is said of it by every answer."""
        status = None if self.running else self.tree.status
        return {
            "process": self.number,
            "pid": self.tree.pid,
            "running": self.running,
            "exit_code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            "next_offset": self.ring.end,
        }

    def line(self) -> bytes:
        """Its line in the list of processes."""
        age_s = int(time.monotonic() - self.started)
        more = {
            "command": self.shown,
            "age_s": age_s,
            "terminal": self.terminal,
            "stdin": self._takes_input(),
        }
        return json.dumps({**self.state(), **more}).encode() + b"\n"

    def _takes_input(self) -> bool:
        return self.input is not None and self.input.open

    def forget(self) -> None:
        """Leave what holds its output to itself."""
        if self.input is not None:
            self.input.close()
        self.agent.abandon(self.ring)
        self.agent.processes.pop(self.number, None)


def start(agent: Agent, op: int, spec: Json) -> Operation:
    """A new background process. The oldest ended ones are forgotten when there are too many."""
    ended = [process for process in agent.processes.values() if not process.running]
    if len(agent.processes) - len(ended) >= wire.MAX_PROCESSES:
        raise Refused("busy", f"{wire.MAX_PROCESSES} background processes run already")
    for process in ended[: max(0, len(ended) - wire.MAX_PROCESSES + 1)]:
        process.forget()
    agent.last_process += 1
    process = Background(agent, agent.last_process, spec)
    agent.processes[process.number] = process
    return Answer(agent, op, process.state())


class Answer(Operation):
    """What was done at once."""

    def __init__(self, agent: Agent, op: int, result: Json, content: bytes = b"") -> None:
        super().__init__(agent, op)
        self.result = result
        self.content = memoryview(content)

    def tick(self, now: float) -> float | None:
        self.content = self.send_some(wire.DATA, self.content)
        if not self.content:
            self.done(self.result)
        return None


def list_processes(agent: Agent, op: int, spec: Json) -> Operation:
    """All background processes, a line of JSON each."""
    lines = [process.line() for process in agent.processes.values()]
    return Answer(agent, op, {"count": len(lines)}, b"".join(lines))


class AboutProcess(Operation):
    """An operation on one process."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op)
        found = agent.processes.get(spec["process"])
        if found is None:
            raise Refused("no_process", f"there is no background process {spec['process']}")
        self.process: Background = found


class ReadProcess(AboutProcess):
    """Output from an offset. Waits up to ``wait_s`` for some, or for the end of the process."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        self.offset, self.limit = int(spec["offset"]), min(int(spec["limit"]), wire.RING)
        self.process.ring.known(self.offset)
        self.until = time.monotonic() + seconds(spec["wait_s"])
        self.answer: Json | None = None
        self.content = memoryview(b"")

    def tick(self, now: float) -> float | None:
        process, ring = self.process, self.process.ring
        if self.answer is None:
            if not process.running and ring.end <= self.offset:
                ring.drain()
            if ring.end <= self.offset and process.running and now < self.until:
                return self.until
            begin, content = ring.read(self.offset, self.limit)
            self.answer = {
                **process.state(),
                "offset": begin,
                "next_offset": begin + len(content),
                "lost_bytes": max(0, begin - max(0, self.offset)),
            }
            self.content = memoryview(content)
        self.content = self.send_some(wire.DATA, self.content)
        if not self.content:
            self.done(self.answer)
        return None


class WriteProcess(AboutProcess):
    """Content for a process's stdin or terminal; ends when the process has taken it."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        if self.process.input is None or not self.process.input.open:
            raise Refused("no_stdin", "the process has no stdin, or it is closed")
        if self.process.writer is not None:
            raise Refused("busy", "another write to this process is under way")
        self.closes = bool(spec.get("close"))
        self.waiting = self.size = 0
        self.all_came = False
        self.input: Input = self.process.input
        self.process.writer = self

    def data(self, body: bytes) -> None:
        self.waiting += len(body)
        self.input.feed(body)

    def taken(self, size: int) -> None:
        """The process, or nobody, took so many bytes."""
        self.waiting -= size
        self.size += size
        self.grant(size)

    def eof(self) -> None:
        self.all_came = True

    def tick(self, now: float) -> float | None:
        if self.input.lost:
            self._leave()
            self.refuse("no_stdin", "the process closed its stdin or has ended")
        elif self.all_came and not self.waiting:
            self._leave()
            if self.closes:
                self.input.end()
            self.done({"size": self.size})
        return None

    def kill(self) -> None:
        """What the process has not taken yet is dropped."""
        self._leave()
        self.input.drop()
        super().kill()

    def _leave(self) -> None:
        self.process.writer = None


class SignalProcess(AboutProcess):
    """A signal to the process group of the first process; one of a number that is none is refused."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        number = int(spec["signal"])
        if not 1 <= number < signal.NSIG:
            raise Refused("bad_signal", f"there is no signal {number}")
        if self.process.tree.status is None:  # its pid may be another's once it was reaped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.tree.pid, number)

    def tick(self, now: float) -> float | None:
        self.done(self.process.state())
        return None


class WaitProcess(AboutProcess):
    """The state of a process once it has ended, or after ``wait_s``."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        self.until = time.monotonic() + seconds(spec["wait_s"])

    def tick(self, now: float) -> float | None:
        if self.process.running and now < self.until:
            return self.until
        self.done(self.process.state())
        return None


class KillProcess(AboutProcess):
    """The kill ladder on all that a process has started; with ``forget``, its output goes too."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        self.forgets = bool(spec.get("forget"))
        self.process.tree.kill()

    def kill(self) -> None:
        """What was begun is done: the answer tells how it ended."""

    def tick(self, now: float) -> float | None:
        if self.process.tree.unkillable:
            self.refuse("unkillable", self.process.tree.unkillable)
        elif not self.process.running:
            if self.forgets:
                self.process.forget()
            self.done(self.process.state())
        return None


class ResizeProcess(AboutProcess):
    """Another size for a process's terminal."""

    def __init__(self, agent: Agent, op: int, spec: Json) -> None:
        super().__init__(agent, op, spec)
        rows, columns = int(spec["rows"]), int(spec["columns"])
        if not self.process.terminal:
            raise Refused("no_terminal", "the process has no terminal")
        if self.process.ring.open:
            with contextlib.suppress(OSError):
                set_size(self.process.ring.fd, rows, columns)

    def tick(self, now: float) -> float | None:
        self.done(self.process.state())
        return None


_OPERATIONS: dict[str, Callable[[Agent, int, Json], Operation]] = {
    "start": start,
    "list": list_processes,
    "read": ReadProcess,
    "write": WriteProcess,
    "signal": SignalProcess,
    "wait": WaitProcess,
    "kill": KillProcess,
    "resize": ResizeProcess,
}


def process_work(agent: Agent, op: int, spec: Json) -> Operation:
    """The operation for a PROCESS request; ``do`` says which."""
    return _OPERATIONS[spec["do"]](agent, op, spec)
