"""The dashboard: from top to bottom what callers see, what waits, what works, what it stands on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from sandfleet.infra_cdk.alarms import Alarms
from sandfleet.infra_cdk.api import Api
from sandfleet.infra_cdk.cache import Cache
from sandfleet.infra_cdk.database import Database
from sandfleet.infra_cdk.executors import Executors
from sandfleet.infra_cdk.gateway import Gateway
from sandfleet.infra_cdk.hosts import Hosts
from sandfleet.infra_cdk.metrics import MINUTE, Metrics
from sandfleet.infra_cdk.queues import Queues
from sandfleet.infra_cdk.telemetry import NAMESPACE, Telemetry

Widget: TypeAlias = cloudwatch.IWidget
Graph: TypeAlias = cloudwatch.IMetric


@dataclass(frozen=True)
class Shown:
    """The parts of a deployment whose figures are shown."""

    api: Api
    function: lambda_.Function
    gateway: Gateway
    queues: Queues
    database: Database
    cache: Cache
    fleets: Mapping[str, Executors | Hosts]
    functions: tuple[lambda_.Function, ...]
    metrics: Metrics
    telemetry: Telemetry


class Dashboard(Construct):
    """One page for whoever is on call."""

    def __init__(self, scope: Construct, id: str, name: str, alarms: Alarms, shown: Shown) -> None:
        super().__init__(scope, id)
        board = cloudwatch.Dashboard(self, "Board", dashboard_name=name)
        board.add_widgets(cloudwatch.AlarmStatusWidget(alarms=alarms.all, width=24, height=4, title="Alarms"))
        board.add_widgets(*_callers(shown))
        for pool, fleet in shown.fleets.items():
            board.add_widgets(*_waits(shown, pool))
            board.add_widgets(*_works(shown, pool, fleet))
        if shown.telemetry.image:
            board.add_widgets(*_processes(shown))
        board.add_widgets(*_database(shown))
        board.add_widgets(*_cache_and_functions(shown))


def _graph(title: str, left: Iterable[Graph], right: Iterable[Graph] = (), width: int = 8) -> Widget:
    return cloudwatch.GraphWidget(title=title, width=width, left=list(left), right=list(right))


def _callers(shown: Shown) -> list[Widget]:
    rest, targets = shown.api.rest, shown.gateway.targets.metrics
    return [
        _graph(
            "Requests and errors",
            [
                rest.metric_count(period=MINUTE),
                rest.metric_client_error(period=MINUTE, statistic="Sum"),
                rest.metric_server_error(period=MINUTE, statistic="Sum"),
            ],
        ),
        _graph(
            "Requests to the Lambda, ms",
            [shown.function.metric_duration(period=MINUTE, statistic=s) for s in ("p50", "p95", "p99")],
            [shown.function.metric("ConcurrentExecutions", period=MINUTE, statistic="Maximum")],
        ),
        _graph(
            "Gateways: answers, 5xx and those that work",
            [
                targets.request_count(period=MINUTE),
                targets.http_code_target(elb.HttpCodeTarget.TARGET_5XX_COUNT, period=MINUTE, statistic="Sum"),
            ],
            [targets.healthy_host_count(period=MINUTE, statistic="Minimum")],
        ),
    ]


def _waits(shown: Shown, pool: str) -> list[Widget]:
    metric, queue = shown.metrics.of_pool, shown.queues.of[pool]
    return [
        _graph(
            f"{pool}: longest wait, s",
            [metric("OldestReadyAge", pool), metric("OldestRoomWait", pool)],
            [metric("ReadyRuns", pool)],
        ),
        _graph(
            f"{pool}: runs, from accepted, s",
            [
                metric(f"{stage}{percent}", pool)
                for stage in ("Dispatch", "Preparation", "FirstOutput", "Total")
                for percent in ("P50", "P95")
            ],
        ),
        _graph(
            f"{pool}: permits",
            [
                queue.metric_approximate_number_of_messages_visible(period=MINUTE),
                queue.metric_approximate_number_of_messages_not_visible(period=MINUTE),
            ],
            [metric("DeadPermits", pool, "Sum")],
        ),
    ]


def _works(shown: Shown, pool: str, fleet: Executors | Hosts) -> list[Widget]:
    metric = shown.metrics.of_pool
    started = (
        _tasks(fleet.service)
        if isinstance(fleet, Executors)
        else [
            cloudwatch.Metric(
                namespace="AWS/AutoScaling",
                metric_name=f"Group{what}",
                dimensions_map={"AutoScalingGroupName": fleet.group_name},
                period=MINUTE,
            )
            for what in ("DesiredCapacity", "InServiceInstances", "PendingInstances", "WarmPoolTotalCapacity")
        ]
    )
    return [
        _graph(
            f"{pool}: executors asked for, alive and busy",
            [metric(name, pool) for name in ("DesiredExecutors", "Executors", "BusyExecutors")],
        ),
        _graph(
            f"{pool}: free slots, and runs that are ready per slot",
            [metric("FreeSlots", pool, "Minimum")],
            [metric("BacklogPerSlot", pool)],
        ),
        _graph(f"{pool}: {'tasks' if isinstance(fleet, Executors) else 'machines'}", started),
    ]


def _tasks(service: ecs.FargateService) -> list[cloudwatch.Metric]:
    dimensions = {"ClusterName": service.cluster.cluster_name, "ServiceName": service.service_name}
    counts = [
        cloudwatch.Metric(
            namespace="ECS/ContainerInsights",
            metric_name=f"{what}TaskCount",
            dimensions_map=dimensions,
            period=MINUTE,
        )
        for what in ("Desired", "Running", "Pending")
    ]
    return [
        *counts,
        service.metric_cpu_utilization(period=MINUTE),
        service.metric_memory_utilization(period=MINUTE),
    ]


def _processes(shown: Shown) -> list[Widget]:
    """What collectors pass on, a line per value of a label."""

    def each(name: str, label: str, statistic: str = "Sum") -> cloudwatch.MathExpression:
        of = f'MetricName="{name}" deployment="{shown.metrics.deployment}"'
        return cloudwatch.MathExpression(
            expression=f"SEARCH('{{{NAMESPACE},deployment,{label}}} {of}', '{statistic}', 60)",
            using_metrics={},
            label="",
            period=MINUTE,
        )

    return [
        _graph("Failures of runs, by stage", [each("sandfleet_run_failures_total", "stage")]),
        _graph(
            "Answers of model providers, and of gateways, by status",
            [each("sandfleet_model_responses_total", "status")],
            [each("sandfleet_http_responses_total", "status")],
        ),
        _graph(
            "Cost by tenant, US dollars, and sandboxes by state",
            [each("sandfleet_cost_usd_total", "tenant")],
            [each("sandfleet_sandboxes", "state")],
        ),
    ]


def _database(shown: Shown) -> list[Widget]:
    database = shown.database

    def metric(name: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace="AWS/RDS", metric_name=name, dimensions_map=database.dimension, period=MINUTE
        )

    slow = "CommitLatency" if database.is_cluster else "WriteLatency"
    return [
        _graph("PostgreSQL: connections", [metric("DatabaseConnections")]),
        _graph(f"PostgreSQL: CPU, %, and {slow}", [metric("CPUUtilization")], [metric(slow)]),
        _graph(
            "PostgreSQL: oldest transaction, s",
            [shown.metrics.of_service("OldestTransactionAge", "sweeper")],
        ),
    ]


def _cache_and_functions(shown: Shown) -> list[Widget]:
    def metric(name: str, node: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace="AWS/ElastiCache",
            metric_name=name,
            dimensions_map={"CacheClusterId": node},
            statistic=statistic,
            period=MINUTE,
        )

    nodes = shown.cache.node_ids
    return [
        _graph(
            "Redis: memory and CPU, %, and evictions",
            [
                metric(name, node, "Maximum")
                for name in ("DatabaseMemoryUsagePercentage", "EngineCPUUtilization")
                for node in nodes
            ],
            [metric("Evictions", node, "Sum") for node in nodes],
        ),
        _graph(
            "Functions: errors and throttles",
            [f.metric_errors(period=MINUTE, statistic="Sum") for f in shown.functions],
            [f.metric_throttles(period=MINUTE, statistic="Sum") for f in shown.functions],
        ),
        _graph(
            "Functions: duration, ms",
            [f.metric_duration(period=MINUTE, statistic="Maximum") for f in shown.functions],
        ),
    ]
