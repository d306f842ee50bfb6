"""All processes that one command has led to, and how they are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from . import memory
from .spawn import MARK, spawn
from .wire import KILL_AT_MOST_S, UNKILLABLE_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent
    from .operation import Json
    from .streams import Stream

_SECRET = os.urandom(16)
_TREE_KILL_S = 1.0  # how long the tree kill may take before everything in the sandbox is killed


class Tree:
    """The processes of one command: the first one's wait status, and the kill ladder."""

    def __init__(self, agent: Agent, spec: Json, merged: bool) -> None:
        self.agent = agent
        self.status: int | None = None  # of the first process, once it has ended
        self.mark = _mark(os.urandom(8).hex())
        self._oom_before = memory.oom_kills()
        self._victims_before, self._large_before = agent.victims, agent.large
        self._victim = False  # one of it was seen to be killed for memory
        self._peak = 0  # bytes that its largest process had, of those that its first one has waited for
        self.spawned = spawn(spec, self.mark, merged)
        self.pid = self.spawned.pid
        self.start_ticks = 0
        self.streams: list[Stream] = []  # that tell who belongs here while they are open
        self.killed_at: float | None = None
        self.dead = False  # killed, and nothing is left
        self.unkillable = ""  # why the agent has given it up
        self.rung = 0
        self._next = 0.0
        self._fewest = sys.maxsize  # living processes that a kill has met at least, and when it met so few
        self._fewest_at = 0.0
        with contextlib.suppress(OSError):
            self.start_ticks = int(_stat(self.pid)[19])
        agent.mains[self.pid] = self

    @property
    def ended(self) -> bool:
        """Whether the first process has ended and, if it was killed, all others too."""
        return self.status is not None and (self.killed_at is None or self.dead)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this tree for memory, or nobody can say that it was another's.

        It counts kills in the sandbox, not whom. Of those since this began, one that hit a large process of another
        command before our eyes is that command's. A child whose own parent waited for it nobody saw: then it was another
        command's if that one had a large process when it ended and this one has had none.
        """
        kills = memory.oom_kills() - self._oom_before
        if kills <= 0 or self._victim:
            return kills > 0
        victims, large = self.agent.victims - self._victims_before, self.agent.large - self._large_before
        others = victims if self.status is None or memory.is_large(self._peak) else victims + large
        return kills > others

    def reaped(self, pid: int, status: int, peak: int) -> None:
        """The agent has waited for a process of this tree, whose largest process so far had ``peak`` bytes.

        Those that the agent kills are no victims of the kernel's.
        """
        if pid == self.pid:
            self.status = status
        self._peak = max(self._peak, peak)
        if self.killed_at is not None or not self.out_of_memory:
            return
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            self._victim = True
            self.agent.victims += memory.is_large(peak)
        elif pid == self.pid and memory.is_large(self._peak):
            self._victim = True  # as far as anybody can know
            self.agent.large += 1

    def kill(self) -> None:
        """Begin to kill."""
        if self.killed_at is None:
            self.killed_at = self._next = time.monotonic()

    def climb(self, now: float) -> float | None:
        """Go on with killing if that was begun; returns when to be called again, None when there is nothing to do."""
        if self.killed_at is None or self.dead or self.unkillable:
            return None
        if now < self._next:
            return self._next
        members, complete = self.members()
        # Nothing forks away from the second rung, so after it any look will do.
        if not members and (complete or self.rung == 2) and self.status is not None:
            self.dead = True
            return None
        self.rung = max(self.rung, 1)
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        spent = now - self.killed_at
        if spent > _TREE_KILL_S:
            if self.rung < 2:
                self.rung, self._fewest = (
                    2,
                    sys.maxsize,
                )  # what forked away from the first rung does not count
            kill_everything()
        if len(members) < self._fewest:
            self._fewest, self._fewest_at = len(members), now
        if now - max(self._fewest_at, self.killed_at) > UNKILLABLE_S or spent > KILL_AT_MOST_S:
            out_of_memory = " after memory had run out" if self.out_of_memory else ""
            self.unkillable = f"a command in it could not be killed{out_of_memory}"
            return None
        self._next = now + (0.005 if spent < 0.05 else 0.05)
        return self._next

    def members(self) -> tuple[set[int], bool]:
        """Living processes of the tree, and whether the look was complete: none ended, and maybe forked, meanwhile.

        To a tree belong its session, what carries its mark or holds its streams, orphans that began after it without a
        mark of the agent's, and all descendants of these.
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
        mains = self.agent.mains
        session_is_ours = self.status is None or self.pid not in mains
        ends = self.spawned.ends if any(stream.open for stream in self.streams) else set()
        children: dict[int, list[int]] = {}
        found: list[int] = []
        for process in processes.values():
            children.setdefault(process.parent, []).append(process.pid)
            orphan = process.parent not in processes and process.pid not in mains
            if (
                (session_is_ours and process.session == self.pid)
                or process.mark == self.mark.encode()
                or (orphan and process.start >= self.start_ticks and not _given(process.mark))
                or (ends and process.holds(ends))
            ):
                found.append(process.pid)
        tree: set[int] = set()
        while found:
            pid = found.pop()
            if pid not in tree:
                tree.add(pid)
                found += children.get(pid, [])
        return tree, complete


def session_of(pid: int) -> int:
    """The session of a process, also of one that has ended and that nobody has waited for; 0 if there is none."""
    with contextlib.suppress(OSError):
        return int(_stat(pid)[3])
    return 0


def _stat(pid: int) -> list[bytes]:
    """What /proc says of a process, from its state on."""
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096).rpartition(b")")[2].split()
    finally:
        os.close(file)


def _mark(nonce: str) -> str:
    """A mark that only this agent can make: SipHash under a key that the interpreter has from the kernel at its start.

    (hashlib would do as well, and take 4 MiB of each sandbox.) So a command cannot have its daemons taken for those of
    another command, which its own end leaves alone, unless the other one helps.
    """
    return f"{nonce}{hash(_SECRET + nonce.encode()) & (2**64 - 1):016x}"


def _given(mark: bytes) -> bool:
    """Whether it is a mark of a command of this agent."""
    nonce = mark[:16].decode("ascii", "replace")
    return mark == _mark(nonce).encode()


class Process:
    """What /proc says of a process: its parent, session, start (ticks since boot) and the mark in its environment."""

    def __init__(self, pid: int) -> None:
        fields = _stat(pid)
        self.pid = pid
        self.dead = fields[0] in (b"Z", b"X")
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.start = int(fields[19])
        self.mark = b""
        if not self.dead:
            with contextlib.suppress(PermissionError), open(f"/proc/{pid}/environ", "rb") as file:
                prefix = MARK.encode() + b"="
                found = (part for part in file.read().split(b"\0") if part.startswith(prefix))
                self.mark = next(found, b"").partition(b"=")[2]

    def holds(self, ends: set[str]) -> bool:
        """Whether one of its descriptors is one of these."""
        with contextlib.suppress(OSError):
            return any(os.readlink(fd.path) in ends for fd in os.scandir(f"/proc/{self.pid}/fd"))
        return False


def kill_everything() -> None:
    """Kill all processes of the sandbox but the agent; outside of a sandbox, where that would be much more, nothing."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)
