"""The figures of a pool, and how they are published."""

from aws_lambda_powertools.metrics import MetricUnit

from sandfleet.functions.emf import NAMESPACE, Figures, emit
from sandfleet.functions.scaler.fleet import Clients
from sandfleet.shared.scaling.decision import Load
from sandfleet.shared.settings import Settings


def figures_of(load: Load, desired: int | None, visible: int | None, latencies: dict[str, float]) -> Figures:
    """Metrics by name. ``desired`` executors were asked for, ``visible`` permits are in the queue; None: not known.
    ``latencies`` are seconds by name."""
    figures: Figures = {
        "OldestReadyAge": (MetricUnit.Seconds, load.oldest_s),
        "OldestRoomWait": (MetricUnit.Seconds, load.room_wait_s),
        "OldestWait": (MetricUnit.Seconds, load.wait_s),
        "ReadyRuns": (MetricUnit.Count, load.ready),
        "BacklogPerSlot": (MetricUnit.Count, load.ready / max(load.slots, 1)),
        "FreeSlots": (MetricUnit.Count, load.room),
        "BusyExecutors": (MetricUnit.Count, load.executors - load.idle),
        "Executors": (MetricUnit.Count, load.executors),
    }
    if desired is not None:
        figures["DesiredExecutors"] = (MetricUnit.Count, desired)
    if visible is not None:
        figures["VisiblePermits"] = (MetricUnit.Count, visible)
    return figures | {name: (MetricUnit.Seconds, value) for name, value in latencies.items()}


async def publish(settings: Settings, clients: Clients, pool: str, figures: Figures) -> None:
    """Publish a pool's figures. An emulator reads no metrics from logs: it is called."""
    dimensions = {"Deployment": settings.deployment, "Pool": pool}
    emit(dimensions, figures)
    if settings.aws_endpoint_url:
        cloudwatch = await clients.of("cloudwatch")
        await cloudwatch.put_metric_data(
            Namespace=NAMESPACE,
            MetricData=[
                {
                    "MetricName": name,
                    "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
                    "Unit": unit.value,
                    "Value": value,
                }
                for name, (unit, value) in figures.items()
            ],
        )
