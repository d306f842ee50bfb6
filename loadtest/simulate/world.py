"""The fleet: executors that start late, take ready runs and stop when idle, under a policy that says how many there should be.

Simplified: runs are taken in the order in which they became ready, by any executor that has a slot; the policy sees the fleet
as it is, without the delays of heartbeats and metrics; a busy executor is never stopped, as with scale-in protection.
"""

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from sandfleet.loadtest.simulate.traces import HOUR_S, Run, Trace

_RECENT = 200
_RECENT_S = 900.0
_END, _UP, _LOOK, _WARM = range(4)


@dataclass(frozen=True)
class Machine:
    """What one executor (or host) is: how many runs it takes at once, and how long it takes to start, at least and at most."""

    name: str
    slots: int
    start_s: tuple[float, float]
    price_per_hour: float
    sandboxes: int | None = None
    """Runs that find room for their sandbox; None: as many as there are slots."""
    warm: int = 0
    """Machines that stand by, stopped: they start in ``warm_start_s``, and each is replaced by one that starts as others do. They
    cost their disks alone, which is not counted."""
    warm_start_s: tuple[float, float] = (0.0, 0.0)

    @property
    def takes(self) -> int:
        """Runs that it executes at once."""
        return self.slots if self.sandboxes is None else min(self.slots, self.sandboxes)


@dataclass(frozen=True)
class View:
    """What a policy sees. ``busy_share`` is the mean share of the slots that were taken since it looked last."""

    at_s: float
    ready: int
    oldest_s: float
    executors: int
    idle: int
    slots: int
    busy: int
    run_s: float | None
    desired: int
    busy_share: float
    free: int = 0
    """Free slots of executors that are not retired, as far as sandboxes have room, too."""
    hosts_taken: float = 0.0
    hosts_wanted: float = 0.0
    """Hosts that sandboxes fill, and that those would fill whose runs wait for room."""
    room_wait_s: float = 0.0


class Asked(NamedTuple):
    """How many executors there should be, and how many of those that are up should take nothing more."""

    desired: int
    surplus: int = 0


class Policy(Protocol):
    """Says how many executors there should be, every ``every_s`` seconds."""

    every_s: float

    def __call__(self, view: View) -> Asked: ...


@dataclass
class Outcome:
    """What became of a trace: how long runs were ready before they began, and what was paid for."""

    waits_s: list[float] = field(default_factory=list)
    machine_s: float = 0.0
    peak: int = 0
    changes: int = 0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, executors that are paid for, ready runs) at each look."""

    @property
    def hours(self) -> float:
        """Machine hours."""
        return self.machine_s / HOUR_S


@dataclass(eq=False)
class _Executor:
    launched_s: float
    up: bool = False
    busy: int = 0
    retired: bool = False
    place: int = -1  # among those that have a free slot


class World:
    """One trace under one policy; `run` goes through it."""

    def __init__(
        self, trace: Trace, machine: Machine, policy: Policy, *, start: int = 1, seed: int = 1
    ) -> None:
        self._trace, self._machine, self._policy = trace, machine, policy
        self._random = Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, int, object]] = []
        self._number = itertools.count()
        self._ready: deque[tuple[float, Run]] = deque()
        self._gated: dict[str, deque[Run]] = {tenant: deque() for tenant in trace.caps}
        self._in_flight = dict.fromkeys(trace.caps, 0)
        self._executors: dict[_Executor, None] = {}  # in the order of their launch
        self._free: list[_Executor] = []
        self._warm = machine.warm
        self._desired = 0
        self._busy = 0
        self._up = 0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._busy_s = self._slot_s = self._counted_s = 0.0
        self._out = Outcome()
        self._ask_for(start, at_once=True)

    def run(self) -> Outcome:
        """Go on until the trace is over and its last run has ended."""
        self._later(self._policy.every_s, _LOOK, None)
        arrivals = iter(self._trace.runs)
        arrival = next(arrivals, None)
        while arrival is not None or self._busy or self._ready or self._now < self._trace.length_s:
            if arrival is not None and arrival.at_s <= self._events[0][0]:
                self._move_to(arrival.at_s)
                self._arrive(arrival)
                arrival = next(arrivals, None)
                continue
            at_s, _, kind, what = heapq.heappop(self._events)
            self._move_to(at_s)
            if kind == _LOOK:
                self._look()
            elif kind == _UP:
                assert isinstance(what, _Executor)
                self._come_up(what)
            elif kind == _WARM:
                self._warm += 1
            else:
                assert isinstance(what, tuple)
                self._end(*what)
        for executor in self._executors:
            self._out.machine_s += self._now - executor.launched_s
        return self._out

    # --- runs --------------------------------------------------------------------------------------------------

    def _arrive(self, run: Run) -> None:
        cap = self._trace.caps.get(run.tenant)
        if cap is not None:
            if self._in_flight[run.tenant] >= cap:
                self._gated[run.tenant].append(run)
                return
            self._in_flight[run.tenant] += 1
        self._ready.append((self._now, run))
        self._take()

    def _take(self) -> None:
        while self._ready and self._free:
            ready_s, run = self._ready.popleft()
            self._out.waits_s.append(self._now - ready_s)
            executor = self._free[self._random.randrange(len(self._free))]
            executor.busy += 1
            self._busy += 1
            if executor.busy == self._machine.takes:
                self._not_free(executor)
            self._later(run.duration_s, _END, (executor, run))

    def _end(self, executor: _Executor, run: Run) -> None:
        executor.busy -= 1
        self._busy -= 1
        self._recent.append((self._now, run.duration_s))
        self._set_free(executor)
        if executor.busy == 0:
            self._stop_surplus()
        if run.tenant in self._in_flight:
            self._in_flight[run.tenant] -= 1
            if self._gated[run.tenant]:
                self._arrive(self._gated[run.tenant].popleft())
        self._take()

    # --- executors ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        share = self._busy_s / self._slot_s if self._slot_s else 0.0
        self._busy_s = self._slot_s = 0.0
        recent = [duration for at_s, duration in self._recent if at_s > self._now - _RECENT_S]
        waiting, wait_s = len(self._ready), self._now - self._ready[0][0] if self._ready else 0.0
        sandboxes, slots = self._machine.sandboxes, self._machine.slots
        # With free slots a run is taken, finds no room, and waits for that: it is not ready then.
        for_room = sandboxes is not None and sandboxes < slots and self._up > 0
        taken = self._busy / sandboxes if for_room and sandboxes else 0.0
        free = sum(slots - e.busy for e in self._executors if e.up and not e.retired)
        view = View(
            at_s=self._now,
            ready=0 if for_room else waiting,
            oldest_s=0.0 if for_room else wait_s,
            executors=self._up,
            idle=sum(executor.up and executor.busy == 0 for executor in self._executors),
            slots=self._up * self._machine.slots,
            busy=self._busy,
            run_s=sum(recent) / len(recent) if recent else None,
            desired=self._desired,
            busy_share=share,
            free=min(free, int((self._up - taken) * slots)),
            hosts_taken=taken,
            hosts_wanted=waiting / sandboxes if for_room and sandboxes else 0.0,
            room_wait_s=wait_s if for_room else 0.0,
        )
        asked = self._policy(view)
        if asked.desired != self._desired:
            self._out.changes += 1
            self._ask_for(asked.desired)
        self._retire(asked.surplus)
        self._out.timeline.append((self._now, len(self._executors), len(self._ready)))
        self._later(self._policy.every_s, _LOOK, None)

    def _ask_for(self, desired: int, *, at_once: bool = False) -> None:
        self._desired = desired
        self._stop_surplus()
        while len(self._executors) < desired:
            executor = _Executor(self._now)
            self._executors[executor] = None
            self._later(0.0 if at_once else self._start_s(), _UP, executor)
        self._out.peak = max(self._out.peak, len(self._executors))

    def _start_s(self) -> float:
        usual_s = self._random.uniform(*self._machine.start_s)
        if not self._warm:
            return usual_s
        self._warm -= 1
        self._later(usual_s, _WARM, None)
        return self._random.uniform(*self._machine.warm_start_s)

    def _stop_surplus(self) -> None:
        idle = (executor for executor in list(self._executors) if executor.up and executor.busy == 0)
        while len(self._executors) > self._desired and (executor := next(idle, None)):
            del self._executors[executor]
            self._up -= 1
            self._not_free(executor)
            self._out.machine_s += self._now - executor.launched_s

    def _retire(self, count: int) -> None:
        up = [executor for executor in self._executors if executor.up]
        up.sort(key=lambda executor: (not executor.retired, executor.busy))
        for place, executor in enumerate(up):
            executor.retired = place < count
            if executor.retired:
                self._not_free(executor)
            elif executor.busy < self._machine.takes:
                self._set_free(executor)
        self._take()

    def _come_up(self, executor: _Executor) -> None:
        executor.up = True
        self._up += 1
        self._set_free(executor)
        self._stop_surplus()
        self._take()

    def _set_free(self, executor: _Executor) -> None:
        if executor.place < 0 and not executor.retired:
            executor.place = len(self._free)
            self._free.append(executor)

    def _not_free(self, executor: _Executor) -> None:
        if executor.place >= 0:
            last = self._free.pop()
            if last is not executor:
                self._free[executor.place] = last
                last.place = executor.place
            executor.place = -1

    # --- time --------------------------------------------------------------------------------------------------

    def _later(self, after_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (self._now + after_s, next(self._number), kind, what))

    def _move_to(self, at_s: float) -> None:
        passed_s = at_s - self._now
        self._busy_s += passed_s * self._busy
        self._slot_s += passed_s * self._up * self._machine.slots
        self._now = at_s
