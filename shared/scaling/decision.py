"""The decision: how many executors (or hosts) a pool should have now. Pure computation, so that a simulator runs the same.

Out: a pool grows when its oldest ready run (or one that waits for a sandbox's room) has waited too long, or when nobody is
there to take it, and only by what it would not work off by itself. In: it shrinks when it has had too much room for a while without a break, by idle executors only. Runs are
spread over all executors, so that none would ever be idle under a steady load: those that are too many take nothing more then.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Policy:
    """What a pool may become, and how patient the decision is. Durations are in seconds."""

    least: int
    most: int
    slots: int
    """Runs that one more executor (or host) brings room for."""
    age_s: float
    """Age of the oldest ready run from which the pool grows."""
    drain_s: float
    """Time in which a backlog may be worked off once there is room: short runs share slots for so long."""
    fill: float
    """Share of its slots that a pool may have taken after it has shrunk, above 0 and at most 1. What lies between it and 1
    is noise that changes nothing."""
    pause_s: float
    """Pause after the pool has grown before it grows again."""
    in_after_s: float
    """How long a pool must have had too much room, without a break, before it shrinks."""
    run_s: float
    """Duration of a run where none has ended yet."""


@dataclass(frozen=True, slots=True)
class Load:
    """A pool as it is now. ``ready`` runs could start at once: capped, delayed and thread-busy ones are none of them."""

    at_s: float
    """The database's clock, in seconds."""
    ready: int
    oldest_s: float
    """Age of the oldest ready run in seconds, 0 without one."""
    executors: int
    """Executors (or hosts) that are alive. Others may be starting."""
    idle: int
    """Those of them that execute nothing and have no sandbox."""
    slots: int
    busy: int
    """Slots that are taken."""
    run_s: float | None
    """Mean duration of the runs that have ended lately, in seconds; None: none has."""
    hosts_taken: float = 0.0
    """How many hosts the sandboxes fill that are there."""
    hosts_wanted: float = 0.0
    """How many more those would fill whose runs wait for room."""
    room_wait_s: float = 0.0
    """How long the first of these has waited, in seconds."""
    free: int = 0
    """Free slots of executors that take runs: not of those that retire."""

    @property
    def wait_s(self) -> float:
        """How long the run has waited that has waited longest, for an executor or for a sandbox's room, in seconds."""
        return max(self.oldest_s, self.room_wait_s)

    @property
    def room(self) -> int:
        """Free slots whose runs would find room for their sandboxes, too: on a host that may end before the slots do."""
        if self.executors == 0:
            return 0
        hosts = max(0.0, self.executors - self.hosts_taken - self.hosts_wanted)
        return min(self.free, math.floor(hosts * self.slots / self.executors))


def to_retire(alive: int, desired: int, surplus: int, *, replacing: bool) -> int:
    """How many of the executors that are ``alive`` should take nothing more when ``desired`` are asked for.

    ``surplus`` is the decision's. While tasks are replaced by a newer version (``replacing``), as many of the old ones as there
    are new ones beside them, and no more: those that are wanted go on.
    """
    return max(0, alive - desired) if replacing else max(0, surplus, alive - desired)


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves for the next. Times are on the database's clock, in seconds."""

    out_at_s: float | None = None
    """When the pool grew last."""
    low_since_s: float | None = None
    """Since when it has had too much room."""
    low_peak: int = 0
    """Most executors that would have been enough since then."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many executors to ask for, how many of them to let run out of work, and what to remember."""

    desired: int
    memory: Memory
    surplus: int = 0
    """Executors that are too many and not idle: they should take nothing more, or they would never be."""


def decide(policy: Policy, load: Load, desired: int, memory: Memory) -> Decision:
    """What a pool that ``desired`` executors were asked for should have now.

    Never less for more or older ready runs, always within ``least`` and ``most``.
    """
    hosts = load.hosts_taken + load.hosts_wanted
    share = _share(policy, load)
    slots_needed = load.busy + load.ready * share
    hosts_needed = load.hosts_taken + load.hosts_wanted * share
    waits = 1 if load.ready or load.hosts_wanted else 0  # runs that take no time need somebody, too
    wanted = _bounded(policy, max(slots_needed / policy.slots, hosts_needed, waits))
    if wanted > desired and (desired < policy.least or _late(policy, load, memory)):
        return Decision(wanted, Memory(out_at_s=load.at_s))
    desired = min(desired, policy.most)
    enough = _bounded(policy, max((load.busy + load.ready) / policy.slots, hosts) / policy.fill)
    if enough >= desired:
        return Decision(desired, replace(memory, low_since_s=None, low_peak=0))
    since_s = load.at_s if memory.low_since_s is None else memory.low_since_s
    peak = max(memory.low_peak, enough)
    low = replace(memory, low_since_s=since_s, low_peak=peak)
    if load.at_s - since_s < policy.in_after_s:
        return Decision(desired, low)
    fewer = min(desired, max(peak, desired - load.idle))
    if fewer > peak:
        return Decision(fewer, low, surplus=fewer - peak)
    return Decision(fewer, replace(memory, low_since_s=load.at_s, low_peak=enough))


def _share(policy: Policy, load: Load) -> float:
    """Slots, or sandboxes, per waiting run that work the backlog off within ``drain_s``: short runs have them one by one."""
    run_s = policy.run_s if load.run_s is None else load.run_s
    return min(1.0, run_s / policy.drain_s)


def _late(policy: Policy, load: Load, memory: Memory) -> bool:
    """Whether ready runs need more than there is or was asked for."""
    if memory.out_at_s is not None and load.at_s - memory.out_at_s < policy.pause_s:
        return False
    if load.executors == 0 and (load.ready or load.hosts_wanted):
        return True
    return (load.ready > 0 and load.oldest_s >= policy.age_s) or (
        load.hosts_wanted > 0 and load.room_wait_s >= policy.age_s
    )


def _bounded(policy: Policy, count: float) -> int:
    return min(max(math.ceil(count), policy.least), policy.most)
