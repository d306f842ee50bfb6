"""What is asked of the system: a pure function of the seed. What must come of it is in `expected`."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

RUNGS = 20
Strategy = Literal["enqueue", "interrupt", "rollback"]


@dataclass(frozen=True, slots=True)
class Cancel:
    """A cancel, ``after_s`` seconds after the run was accepted."""

    after_s: float
    action: Literal["interrupt", "rollback"]
    wait: bool


@dataclass(frozen=True, slots=True)
class Climb:
    """One run of the graph ``ladder``; its salt is unique among all runs. The other fields are the graph's."""

    salt: str
    steps: int
    delay_ms: float = 0.0
    fail_at: int | None = None
    ask_at: int | None = None
    die_at: int | None = None
    fan_at: int | None = None
    note_at: int | None = None
    renote_at: int | None = None
    after_s: float = 0.0
    """Delay of the start."""
    strategy: Strategy = "enqueue"
    cancel: Cancel | None = None
    how: Literal["create", "wait"] = "create"
    """Whether the submission holds the request until the run is over."""
    modes: tuple[str, ...] = ("updates",)
    followed: bool = False
    """Somebody reads its stream, through reconnects."""

    def input(self) -> dict[str, Any]:
        """The graph's input. What is null is said, since a thread's next run meets the state of the last."""
        names = ("fail_at", "ask_at", "die_at", "fan_at", "note_at", "renote_at")
        given = {name: getattr(self, name) for name in names}
        return {"salt": self.salt, "steps": self.steps, "delay_ms": self.delay_ms, **given}


@dataclass(frozen=True, slots=True)
class Commands:
    """One run of the graph ``sandboxed``: each command appends a line to a file and counts its lines."""

    salt: str
    count: int


@dataclass(frozen=True, slots=True)
class Thread:
    """The runs of one thread, submitted one after the other without waiting. A climb that asks is alone and gets an answer."""

    runs: tuple[Climb, ...] = ()
    commands: Commands | None = None

    def __len__(self) -> int:
        asks = sum(climb.ask_at is not None for climb in self.runs)
        return len(self.runs) + asks + (self.commands is not None)


def threads(seed: int, runs: int, *, sandboxes: bool, poison: bool = True) -> Iterator[Thread]:
    """Threads with at least ``runs`` runs in all, and no thread more than that takes."""
    source = random.Random(f"workload {seed}")
    made = 0
    number = 0
    while made < runs:
        number += 1
        thread = _thread(source, f"t{number}", sandboxes, poison)
        made += len(thread)
        yield thread


def _thread(source: random.Random, name: str, sandboxes: bool, poison: bool) -> Thread:
    kind = source.random()
    if sandboxes and kind < 0.02:
        return Thread(commands=Commands(name, source.randint(1, 4)))
    if poison and kind < 0.0225:
        climb = _climb(source, f"{name}r1")
        return Thread((Climb(climb.salt, climb.steps, die_at=source.randint(1, climb.steps)),))
    if kind < 0.15:
        return Thread((_asking(source, f"{name}r1"),))
    count = 1 if kind < 0.6 else source.randint(2, 5)
    return Thread(tuple(_climb(source, f"{name}r{n}", later=n > 1) for n in range(1, count + 1)))


def _climb(source: random.Random, salt: str, *, later: bool = False) -> Climb:
    steps = source.randint(1, RUNGS)

    def perhaps(chance: float) -> int | None:
        return source.randint(1, steps) if source.random() < chance else None

    fate = source.random()
    cancel = None
    if fate < 0.1:
        action: Literal["interrupt", "rollback"] = "interrupt" if fate < 0.07 else "rollback"
        cancel = Cancel(source.expovariate(2), action, source.random() < 0.3)
    strategy: Strategy = "enqueue"
    if later and source.random() < 0.2:
        strategy = "interrupt" if source.random() < 0.6 else "rollback"
    return Climb(
        salt,
        steps,
        delay_ms=source.choice((0, 20, 100, 300)) if cancel is None else 100,
        fail_at=source.randint(1, steps) if 0.1 <= fate < 0.2 else None,
        fan_at=perhaps(0.15),
        note_at=perhaps(0.2),
        renote_at=perhaps(0.1),
        after_s=source.uniform(0.1, 4) if source.random() < 0.08 else 0.0,
        strategy=strategy,
        cancel=cancel,
        how="wait" if cancel is None and source.random() < 0.15 else "create",
        modes=source.choice((("updates",), ("updates", "values"), ("values",), ("updates", "tasks"))),
        followed=source.random() < 0.2,
    )


def _asking(source: random.Random, salt: str) -> Climb:
    climb = _climb(source, salt)
    return Climb(
        climb.salt, climb.steps, climb.delay_ms, ask_at=source.randint(1, climb.steps), followed=True
    )
