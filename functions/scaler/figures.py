"""The figures of a pool as CloudWatch gets them: in a line of the log (EMF), which costs no call."""

from aws_lambda_powertools import Metrics
from aws_lambda_powertools.metrics import MetricResolution, MetricUnit

from sandfleet.functions.scaler.fleet import Clients
from sandfleet.shared.scaling.decision import Load
from sandfleet.shared.settings import Settings

NAMESPACE = "sandfleet"
DIMENSION = "Pool"

Figures = dict[str, tuple[MetricUnit, float]]


def figures_of(load: Load, desired: int | None, visible: int | None, latencies: dict[str, float]) -> Figures:
    """Metrics by name. ``desired`` executors were asked for, ``visible`` permits are in the queue; None: not known.
    ``latencies`` are seconds by name."""
    figures: Figures = {
        "OldestReadyAge": (MetricUnit.Seconds, load.oldest_s),
        "ReadyRuns": (MetricUnit.Count, load.ready),
        "BacklogPerSlot": (MetricUnit.Count, load.ready / max(load.slots, 1)),
        "FreeSlots": (MetricUnit.Count, max(0, load.slots - load.busy)),
        "BusyExecutors": (MetricUnit.Count, load.executors - load.idle),
        "Executors": (MetricUnit.Count, load.executors),
    }
    if load.room_wait_s:
        figures["OldestRoomWait"] = (MetricUnit.Seconds, load.room_wait_s)
    if desired is not None:
        figures["DesiredExecutors"] = (MetricUnit.Count, desired)
    if visible is not None:
        figures["VisiblePermits"] = (MetricUnit.Count, visible)
    return figures | {name: (MetricUnit.Seconds, value) for name, value in latencies.items()}


async def publish(settings: Settings, clients: Clients, pool: str, figures: Figures) -> None:
    """Publish a pool's figures at a resolution of a second. An emulator reads no metrics from logs: it is called."""
    metrics = Metrics(namespace=NAMESPACE, service="")  # a service would be a second dimension
    metrics.add_dimension(DIMENSION, pool)
    for name, (unit, value) in figures.items():
        metrics.add_metric(name, unit, value, resolution=MetricResolution.High)
    metrics.flush_metrics()
    if settings.aws_endpoint_url:
        cloudwatch = await clients.of("cloudwatch")
        await cloudwatch.put_metric_data(
            Namespace=NAMESPACE,
            MetricData=[
                {
                    "MetricName": name,
                    "Dimensions": [{"Name": DIMENSION, "Value": pool}],
                    "Unit": unit.value,
                    "Value": value,
                }
                for name, (unit, value) in figures.items()
            ],
        )
