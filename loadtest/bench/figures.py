"""From samples to figures: rates, percentiles, CPU time per run."""

from collections.abc import Sequence
from dataclasses import dataclass

from sandfleet.loadtest.bench.loop import Round, Sample
from sandfleet.loadtest.percentile import percentile

LATENCIES = ("submit→accept", "accept→model", "accept→token", "accept→end")


@dataclass(frozen=True)
class Figures:
    """What one target did at one concurrency, over all its rounds.

    ``latencies_ms`` maps each of `LATENCIES` to (p50, p95); failed runs count in none of the figures but ``failures``.
    ``cpu_ms_per_run`` is per process, over the runs that were started.
    """

    target: str
    concurrency: int
    runs: int
    runs_per_s: float
    slowest_round_per_s: float
    fastest_round_per_s: float
    latencies_ms: dict[str, tuple[float, float]]
    cpu_ms_per_run: dict[str, float]
    failures: int
    failure_messages: list[str]


def figures(target: str, concurrency: int, rounds: Sequence[Round]) -> Figures:
    """Sum up the rounds of one target at one concurrency."""
    samples = [sample for part in rounds for sample in part.samples]
    good = [sample for sample in samples if sample.failure is None]
    rates = [_good(part) / part.wall_s for part in rounds]
    names = dict.fromkeys(name for part in rounds for name in part.cpu_ms)
    return Figures(
        target=target,
        concurrency=concurrency,
        runs=len(samples),
        runs_per_s=len(good) / sum(part.wall_s for part in rounds),
        slowest_round_per_s=min(rates),
        fastest_round_per_s=max(rates),
        latencies_ms={name: _percentiles(good, name) for name in LATENCIES},
        cpu_ms_per_run={n: sum(p.cpu_ms.get(n, 0.0) for p in rounds) / len(samples) for n in names},
        failures=len(samples) - len(good),
        failure_messages=sorted({sample.failure for sample in samples if sample.failure})[:5],
    )


def _good(part: Round) -> int:
    return sum(sample.failure is None for sample in part.samples)


def _latency_ms(sample: Sample, name: str) -> float:
    begin, end = {
        "submit→accept": (sample.submitted_at_s, sample.accepted_at_s),
        "accept→model": (sample.accepted_at_s, sample.model_at_s),
        "accept→token": (sample.accepted_at_s, sample.first_token_at_s),
        "accept→end": (sample.accepted_at_s, sample.terminal_at_s),
    }[name]
    return (end - begin) * 1000


def _percentiles(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """(p50, p95) by nearest rank; zeros if there is no sample."""
    values = [_latency_ms(sample, name) for sample in samples]
    return (percentile(values, 50), percentile(values, 95)) if values else (0.0, 0.0)
