"""Arrivals of runs over time. Durations are heavy-tailed: most runs are short, a few take a thousand times as long."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

MEAN_RUN_S = 20.0
_SIGMA = 1.4  # lognormal: the median is 7.5 s, one in a hundred takes more than 195 s
_LONGEST_S = 3600.0
HOUR_S = 3600.0


class Run(NamedTuple):
    """When a run is submitted, in seconds from the beginning, how long it takes, and whose it is."""

    at_s: float
    duration_s: float
    tenant: str = "a"


@dataclass(frozen=True)
class Trace:
    """Runs in the order of their arrival. ``caps`` says how many of a tenant's may be ready or running at once."""

    name: str
    length_s: float
    runs: list[Run]
    caps: dict[str, int] = field(default_factory=dict)


def duration_s(random: Random) -> float:
    """How long a run takes."""
    mu = math.log(MEAN_RUN_S) - _SIGMA**2 / 2
    return min(random.lognormvariate(mu, _SIGMA), _LONGEST_S)


def arrivals(random: Random, length_s: float, rate: Callable[[float], float], most: float) -> Iterator[Run]:
    """A Poisson process whose rate per second changes over time and is ``most`` at most."""
    at_s = 0.0
    while (at_s := at_s + random.expovariate(most)) < length_s:
        if random.random() * most < rate(at_s):
            yield Run(at_s, duration_s(random))


def _batch(random: Random, at_s: float, count: int, within_s: float, tenant: str = "a") -> list[Run]:
    return sorted(Run(at_s + random.random() * within_s, duration_s(random), tenant) for _ in range(count))


def traces(seed: int = 1) -> list[Trace]:
    """The traces that policies are compared on. With executors of 64 slots the mean load is given in brackets."""
    random = Random(seed)
    two_hours, day = 2 * HOUR_S, 6 * HOUR_S
    base = list(arrivals(random, two_hours, lambda _: 2.0, 2.0))
    bursts = [run for n in range(7) for run in _batch(random, 600.0 + n * 900.0, 800, 30.0)]
    return [
        Trace("steady (3.1 executors)", two_hours, list(arrivals(random, two_hours, lambda _: 10.0, 10.0))),
        Trace("bursts of 800 within 30 s", two_hours, sorted(base + bursts)),
        Trace(
            "daily wave in 6 h (0.3 to 5)",
            day,
            list(arrivals(random, day, lambda at_s: 8.5 - 7.5 * math.cos(2 * math.pi * at_s / day), 16.0)),
        ),
        Trace("one batch of 20,000", two_hours, sorted(base + _batch(random, 600.0, 20_000, 10.0))),
        Trace(
            "a capped tenant's 5,000",
            two_hours,
            sorted(base + _batch(random, 600.0, 5_000, 10.0, "capped")),
            {"capped": 40},
        ),
        Trace("a run in five minutes", day, list(arrivals(random, day, lambda _: 1 / 300, 1 / 300))),
    ]
