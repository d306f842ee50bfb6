"""Figures as CloudWatch gets them: in a line of the log (EMF), which costs no call."""

from collections.abc import Mapping

from aws_lambda_powertools import Metrics
from aws_lambda_powertools.metrics import MetricResolution, MetricUnit

NAMESPACE = "sandfleet"

Figures = dict[str, tuple[MetricUnit, float]]
"""(unit, value) by name."""


def emit(dimensions: Mapping[str, str], figures: Figures) -> None:
    """Write them, at a resolution of a second, with these dimensions and no others. Alarms name all of them: one more or less
    would be another metric."""
    metrics = Metrics(namespace=NAMESPACE, service="")  # a service would be a dimension, too
    for name, named in dimensions.items():
        metrics.add_dimension(name, named)
    for name, (unit, value) in figures.items():
        metrics.add_metric(name, unit, value, resolution=MetricResolution.High)
    metrics.flush_metrics()
