"""Metrics are documented, and whoever comes from outside makes no series without end."""

import json
import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from sandfleet.fleet.executor import metrics as executor_metrics
from sandfleet.fleet.sandbox import metrics as sandbox_metrics
from sandfleet.functions.api import gateway_metrics
from sandfleet.shared.metrics_server import OTHER, BoundedLabel

DOCS = Path(__file__).parents[2] / "docs"
OURS = {
    made.describe()[0].name
    for module in (executor_metrics, sandbox_metrics, gateway_metrics)
    for made in vars(module).values()
    if isinstance(made, MetricWrapperBase) and not made._labelvalues
}


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    """Red for a metric that nobody on call could look up, or that was renamed."""
    text = (DOCS / "observability.md").read_text()
    assert set(re.findall(r"^\| `(sandfleet_\w+)`", text, re.MULTILINE)) == OURS


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Red when a panel stays empty for ever."""
    dashboard = json.loads((DOCS / "grafana" / "sandfleet.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sandfleet_\w+", target["expr"])
    }
    assert asked
    assert {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in asked} <= OURS


def test_a_label_from_outside_has_so_many_values_and_no_more() -> None:
    """Red when a caller can make a process keep a series for each name that he thinks of."""
    label = BoundedLabel(2, known=["a"])
    assert [label.of(value) for value in ("b", "a", "c", "d", "b")] == ["b", "a", OTHER, OTHER, "b"]
