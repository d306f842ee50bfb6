"""The dashboard: from left to right what callers see, what waits, what works, what it stands on."""

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from sandfleet.infra_cdk.alarms import Alarms
from sandfleet.infra_cdk.api import Api
from sandfleet.infra_cdk.database import Database
from sandfleet.infra_cdk.queues import Queues
from sandfleet.infra_cdk.scaling import metric

_MINUTE = Duration.minutes(1)


class Dashboard(Construct):
    """One page for whoever is on call."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        name: str,
        alarms: Alarms,
        api: Api,
        queues: Queues,
        database: Database,
    ) -> None:
        super().__init__(scope, id)
        board = cloudwatch.Dashboard(self, "Board", dashboard_name=name)
        board.add_widgets(cloudwatch.AlarmStatusWidget(alarms=alarms.all, width=24, height=4, title="Alarms"))
        board.add_widgets(
            cloudwatch.GraphWidget(
                title="Requests and errors",
                width=12,
                left=[
                    api.rest.metric_count(period=_MINUTE),
                    api.rest.metric_client_error(period=_MINUTE, statistic="Sum"),
                    api.rest.metric_server_error(period=_MINUTE, statistic="Sum"),
                ],
            ),
            cloudwatch.GraphWidget(
                title="Latency, ms",
                width=12,
                left=[
                    api.rest.metric_latency(period=_MINUTE, statistic=statistic)
                    for statistic in ("p50", "p95", "p99")
                ],
            ),
        )
        for pool, queue in queues.of.items():
            board.add_widgets(
                cloudwatch.GraphWidget(
                    title=f"{pool}: oldest ready run, s",
                    width=8,
                    left=[metric("OldestReadyAge", pool)],
                ),
                cloudwatch.GraphWidget(
                    title=f"{pool}: executors and slots",
                    width=8,
                    left=[metric("BusyExecutors", pool), metric("FreeSlots", pool)],
                    right=[metric("BacklogPerSlot", pool)],
                ),
                cloudwatch.GraphWidget(
                    title=f"{pool}: permits",
                    width=8,
                    left=[
                        queue.metric_approximate_number_of_messages_visible(period=_MINUTE),
                        queue.metric_approximate_number_of_messages_not_visible(period=_MINUTE),
                        queues.dead[pool].metric_approximate_number_of_messages_visible(period=_MINUTE),
                    ],
                ),
            )
        board.add_widgets(
            *(
                cloudwatch.GraphWidget(
                    title=f"PostgreSQL: {title}",
                    width=8,
                    left=[
                        cloudwatch.Metric(
                            namespace="AWS/RDS",
                            metric_name=name,
                            dimensions_map=database.dimension,
                            period=_MINUTE,
                        )
                    ],
                )
                for title, name in (
                    ("connections", "DatabaseConnections"),
                    ("CPU, %", "CPUUtilization"),
                    ("commit latency, ms", "CommitLatency")
                    if database.is_cluster
                    else ("write latency, s", "WriteLatency"),
                )
            )
        )
