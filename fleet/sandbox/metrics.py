"""What an executor's runs see of their sandboxes, counted for Prometheus; `docs/observability.md` says what each means."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

_SANDBOXES = Gauge("sandfleet_run_sandboxes", "Sandboxes as the runs here see them.", ["state"])
_LOST = Counter("sandfleet_run_sandboxes_lost", "Losses of a sandbox that a run was told of.")
_ACQUIRE = Histogram(
    "sandfleet_sandbox_acquire_seconds", "Getting a sandbox.", ["outcome"], buckets=_BUCKETS_S
)
_EXEC = Histogram("sandfleet_sandbox_exec_seconds", "Commands in sandboxes.", ["outcome"], buckets=_BUCKETS_S)

_acquiring, _held = _SANDBOXES.labels("acquiring"), _SANDBOXES.labels("held")
_OUTCOMES = ("ok", "error", "cancelled")
_acquires = {outcome: _ACQUIRE.labels(outcome) for outcome in _OUTCOMES}
_execs = {outcome: _EXEC.labels(outcome) for outcome in _OUTCOMES}


@contextmanager
def acquiring() -> Iterator[None]:
    """While a run gets its sandbox."""
    with _acquiring.track_inprogress(), _timed(_acquires):
        yield


@contextmanager
def executing() -> Iterator[None]:
    """While a command runs, its way to the sandbox included."""
    with _timed(_execs):
        yield


def held(by: int) -> None:
    """Runs have one sandbox more (1) or less (-1)."""
    _held.inc(by)


def lost() -> None:
    """A run was told that its sandbox was lost."""
    _LOST.inc()


@contextmanager
def _timed(series: dict[str, Histogram]) -> Iterator[None]:
    begun, outcome = time.monotonic(), "cancelled"
    try:
        yield
        outcome = "ok"
    except Exception:
        outcome = "error"
        raise
    finally:
        series[outcome].observe(time.monotonic() - begun)
