"""Which fault comes when: a pure function of the seed, so that a seed replays the faults of a run that failed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

EVERY_S = 0.25
"""Pause between two faults."""

APIS = ("api", "api-2")
EXECUTORS = ("executor-1", "executor-2", "executor-3")
HOST = "host"
POINTS = ("checkpoint.before", "tool.effect_done", "event.journalled", "finish.before", "renewal.before")
"""Where an executor is frozen: just before, or just behind, what only a fence or the ledger can make harmless."""


class Kind(StrEnum):
    """What happens to the target."""

    KILL = "kill"
    """SIGKILL; the process is started again."""
    TERM = "term"
    """SIGTERM, and after its end the process is started again."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after ``duration_s``."""
    FREEZE = "freeze"
    """SIGSTOP of the next executor that comes to a named point, the target, and SIGCONT after ``duration_s``, when its leases
    have run out. What it was about to write or has just done is then sure to meet its successor."""
    REDIS_KILL = "redis-kill"
    REDIS_FLUSH = "redis-flush"
    POSTGRES_STOP = "postgres-stop"
    """A fast shutdown: sessions are ended, nothing is to be recovered."""
    POSTGRES_CRASH = "postgres-crash"
    """An immediate shutdown: PostgreSQL comes back by crash recovery."""
    QUEUE_STOP = "queue-stop"
    """The queues answer nobody for ``duration_s``."""
    RINGS_DROPPED = "rings-dropped"
    RINGS_DOUBLED = "rings-doubled"
    PERMITS_DROPPED = "permits-dropped"
    PERMITS_DOUBLED = "permits-doubled"


# Per thousand. The losses of messages are cheap, so they fill most of the time; those of processes are as frequent as lets
# work go on between them on two cores that others use too: the start of an executor takes 2.5 s of one of them.
# PostgreSQL's are many leases apart, since no lease expires within one lease of its start.
_WEIGHTS = {
    (Kind.KILL, EXECUTORS): 12,
    (Kind.TERM, EXECUTORS): 6,
    (Kind.STOP, EXECUTORS): 5,
    (Kind.FREEZE, POINTS): 12,
    (Kind.KILL, APIS): 7,
    (Kind.TERM, APIS): 4,
    (Kind.STOP, APIS): 6,
    (Kind.KILL, (HOST,)): 4,
    (Kind.STOP, (HOST,)): 4,
    (Kind.REDIS_KILL, ("redis",)): 20,
    (Kind.REDIS_FLUSH, ("redis",)): 50,
    (Kind.POSTGRES_STOP, ("postgres",)): 5,
    (Kind.POSTGRES_CRASH, ("postgres",)): 5,
    (Kind.QUEUE_STOP, ("ministack",)): 8,
    (Kind.RINGS_DROPPED, ("redis",)): 215,
    (Kind.RINGS_DOUBLED, ("redis",)): 215,
    (Kind.PERMITS_DROPPED, ("ministack",)): 215,
    (Kind.PERMITS_DOUBLED, ("ministack",)): 215,
}
_ON_PROCESSES = (Kind.KILL, Kind.TERM, Kind.STOP, Kind.FREEZE)
_STOPS = {
    Kind.STOP: (1.0, 20.0),
    Kind.FREEZE: (7.0, 14.0),
    Kind.QUEUE_STOP: (1.0, 8.0),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, ``at_s`` seconds after the schedule's begin. ``target`` is a process of the stack, or a point."""

    at_s: float
    kind: Kind
    target: str
    duration_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.duration_s:.1f} s" if self.duration_s else ""
        return f"{self.at_s:8.2f} s  {self.kind} {self.target}{lasting}"


def schedule(seed: int, harm: int = 1) -> Iterator[Fault]:
    """The endless schedule of a seed: a fault every `EVERY_S`. With ``harm`` processes are hit so many times as often."""
    source = random.Random(f"faults {seed}")
    choices = list(_WEIGHTS)
    weights = [weight * (harm if kind in _ON_PROCESSES else 1) for (kind, _), weight in _WEIGHTS.items()]
    number = 0
    while True:
        number += 1
        ((kind, targets),) = source.choices(choices, weights)
        target = source.choice(targets)
        shortest, longest = _STOPS.get(kind, (0.0, 0.0))
        yield Fault(number * EVERY_S, kind, target, source.uniform(shortest, longest))
