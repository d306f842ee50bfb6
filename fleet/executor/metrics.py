"""What an executor counts, for Prometheus. `docs/observability.md` says what each metric means.

The names of tenants come from outside and are bounded; graphs are those of the project; all other labels are fixed here.
Everything may be called from any thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from sandfleet.fleet.executor.failure_stage import Stage
from sandfleet.shared.metrics_server import OTHER, BoundedLabel
from sandfleet.shared.prices import Usage
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import ClaimedRun, Ending

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

_SLOTS = Gauge("sandfleet_slots", "Runs that this executor takes at once.", ["pool"])
_ACTIVE = Gauge("sandfleet_runs_active", "Runs that have a slot here.", ["pool"])
_CLAIMED = Counter("sandfleet_runs_claimed", "Attempts of runs begun here.", ["pool", "graph"])
_ENDED = Counter("sandfleet_runs_ended", "Runs ended here.", ["pool", "graph", "status"])
_LEFT = Counter("sandfleet_runs_left", "Attempts that did not end their run.", ["pool", "graph", "why"])
_FAILURES = Counter(
    "sandfleet_run_failures", "Runs that ended in error or by timeout.", ["pool", "graph", "stage"]
)
_DISPATCH = Histogram(
    "sandfleet_run_dispatch_seconds",
    "From ready to claimed, per attempt.",
    ["pool", "graph"],
    buckets=_LATENCY_S,
)
_PREPARATION = Histogram(
    "sandfleet_run_preparation_seconds",
    "From claimed to the graph's start.",
    ["pool", "graph"],
    buckets=_LATENCY_S,
)
_FIRST_OUTPUT = Histogram(
    "sandfleet_run_first_output_seconds",
    "From accepted to the model's first output.",
    ["pool", "graph"],
    buckets=_LATENCY_S,
)
_TOTAL = Histogram(
    "sandfleet_run_total_seconds",
    "From accepted to ended.",
    ["pool", "graph"],
    buckets=_LATENCY_S,
)
_MODEL_CALLS_IN_FLIGHT = Gauge("sandfleet_model_calls_in_flight", "Model calls under way.")
_MODEL_CALLS = Histogram(
    "sandfleet_model_call_seconds", "Model calls, retries included.", ["outcome"], buckets=_LATENCY_S
)
_MODEL_RESPONSES = Counter(
    "sandfleet_model_responses",
    "HTTP responses of model providers, each retry by itself.",
    ["status"],
)
_TOOL_CALLS_IN_FLIGHT = Gauge("sandfleet_tool_calls_in_flight", "Tool calls under way.")
_TOOL_CALLS = Histogram("sandfleet_tool_call_seconds", "Tool calls.", ["outcome"], buckets=_LATENCY_S)
_TOKENS = Counter("sandfleet_tokens", "Tokens of models.", ["tenant", "kind"])
_COST = Counter("sandfleet_cost_usd", "What the tokens cost by the price table.", ["tenant"])
_UNPRICED = Counter("sandfleet_unpriced_tokens", "Tokens of models that the price table does not have.")


_OUTCOMES = ("ok", "error", "cancelled")
_STATUSES = ("2xx", "4xx", "429", "5xx", "none")


class _OfGraph:
    """The series of one graph, found once: a run pays for no look-up of labels."""

    def __init__(self, pool: str, graph: str) -> None:
        self.claimed = _CLAIMED.labels(pool, graph)
        self.dispatch = _DISPATCH.labels(pool, graph)
        self.preparation = _PREPARATION.labels(pool, graph)
        self.first_output = _FIRST_OUTPUT.labels(pool, graph)
        self.total = _TOTAL.labels(pool, graph)
        self.ended = {
            status: _ENDED.labels(pool, graph, status)
            for status in ("success", "error", "timeout", "interrupted")
        }
        self.left = {why: _LEFT.labels(pool, graph, why) for why in ("superseded", "handed_over", "no_room")}
        self.failures = {stage: _FAILURES.labels(pool, graph, stage) for stage in get_args(Stage)}


_model_calls = {outcome: _MODEL_CALLS.labels(outcome) for outcome in _OUTCOMES}
_tool_calls = {outcome: _TOOL_CALLS.labels(outcome) for outcome in _OUTCOMES}
_responses = {status: _MODEL_RESPONSES.labels(status) for status in _STATUSES}


class ExecutorMetrics:
    """What one executor counts of its runs and of their calls."""

    def __init__(self, settings: Settings, graphs: Iterable[str]) -> None:
        self._pool = settings.pool
        self._tenants = BoundedLabel(settings.metrics_tenants)
        self._graphs = {graph: _OfGraph(settings.pool, graph) for graph in (*graphs, OTHER)}
        _SLOTS.labels(settings.pool).set(settings.slots)

    def watch_active(self, active: Callable[[], int]) -> None:
        """Ask ``active`` for the number of runs that have a slot, at each scrape."""
        _ACTIVE.labels(self._pool).set_function(active)

    def _of(self, run: ClaimedRun) -> _OfGraph:
        return self._graphs.get(run.graph_id) or self._graphs[OTHER]

    def claimed(self, run: ClaimedRun) -> None:
        """An attempt begins."""
        of = self._of(run)
        of.claimed.inc()
        if run.ready_at is not None:
            of.dispatch.observe(_between(run.ready_at, run.claimed_at))

    def ended(self, run: ClaimedRun, ending: Ending, ended_at: datetime, stage: Stage | None) -> None:
        """The run has ended here, at ``ended_at`` on the database's clock. ``stage``: where it failed."""
        of = self._of(run)
        of.ended[ending.status].inc()
        if stage is not None:
            of.failures[stage].inc()
        if ending.prepared_at is not None:
            of.preparation.observe(_between(run.claimed_at, ending.prepared_at))
        if ending.first_output_at is not None and run.fence.attempt == 1:
            of.first_output.observe(_between(run.created_at, ending.first_output_at))
        of.total.observe(_between(run.created_at, ended_at))

    def left(self, run: ClaimedRun, why: str) -> None:
        """The attempt is over and the run is not: ``superseded``, ``handed_over`` or ``no_room``."""
        self._of(run).left[why].inc()

    def used(self, tenant: str, usage: Usage, cost: float | None) -> None:
        """A model call has used tokens of a tenant's; ``cost`` in US dollars, None for a model without a price."""
        label = self._tenants.of(tenant)
        plain = usage.input - usage.cache_read
        for kind, count in (("input", plain), ("cached_input", usage.cache_read), ("output", usage.output)):
            if count > 0:
                _TOKENS.labels(label, kind).inc(count)
        if cost is None:
            _UNPRICED.inc(usage.input + usage.output)
        elif cost > 0:
            _COST.labels(label).inc(cost)


def _between(start: datetime, end: datetime) -> float:
    """Seconds from one time of the database's clock to a later one."""
    return max(0.0, (end - start).total_seconds())


def model_call_begins() -> None:
    """A model is asked."""
    _MODEL_CALLS_IN_FLIGHT.inc()


def model_call_ends(begun: float, outcome: str) -> None:
    """It has answered, or will not: ``ok``, ``error`` or ``cancelled``. ``begun`` is a monotonic time."""
    _MODEL_CALLS_IN_FLIGHT.dec()
    _model_calls[outcome].observe(time.monotonic() - begun)


def model_response(status: int | None) -> None:
    """A provider has answered one HTTP request with this status; None when the request failed without an answer."""
    if status is None:
        name = "none"
    elif status == 429:
        name = "429"
    elif status < 400:
        name = "2xx"
    else:
        name = "4xx" if status < 500 else "5xx"
    _responses[name].inc()


@contextmanager
def tool_call() -> Iterator[None]:
    """While a tool is at work."""
    begun = time.monotonic()
    outcome = "cancelled"
    _TOOL_CALLS_IN_FLIGHT.inc()
    try:
        yield
        outcome = "ok"
    except Exception:
        outcome = "error"
        raise
    finally:
        _TOOL_CALLS_IN_FLIGHT.dec()
        _tool_calls[outcome].observe(time.monotonic() - begun)
