"""Alarms for people: each goes to the topic, and has a section of docs/runbook.md."""

from collections.abc import Iterable
from typing import Final

from aws_cdk import CfnResource, Duration, Stack
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from sandfleet.infra_cdk.api import Api
from sandfleet.infra_cdk.cache import Cache
from sandfleet.infra_cdk.database import Database
from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.gateway import Gateway
from sandfleet.infra_cdk.hosts import Hosts
from sandfleet.infra_cdk.metrics import MINUTE, Metrics
from sandfleet.infra_cdk.queues import Queues
from sandfleet.infra_cdk.sizes import Size

READY_AGE_S: Final = 300
PERMIT_AGE_S: Final = 12 * 3600
"""A permit is held while its run runs and replaced after 11 h, so an older one is nobody's."""
TRANSACTION_AGE_S: Final = 120


def private_topic(scope: Construct, id: str) -> sns.Topic:
    """A topic that takes messages over TLS alone, and those of this account's alarms."""
    topic = sns.Topic(scope, id, enforce_ssl=True)
    topic.add_to_resource_policy(
        iam.PolicyStatement(
            actions=["sns:Publish"],
            principals=[iam.ServicePrincipal("cloudwatch.amazonaws.com")],
            resources=[topic.topic_arn],
            conditions={"StringEquals": {"aws:SourceAccount": Stack.of(scope).account}},
        )
    )
    return topic


class Alarms(Construct):
    """The topic and all alarms."""

    def __init__(self, scope: Construct, id: str, email: str, metrics: Metrics, emulator: Emulator) -> None:
        super().__init__(scope, id)
        self._metrics, self._emulator = metrics, emulator
        self.topic = private_topic(self, "Topic")
        if email:
            self.topic.add_subscription(subscriptions.EmailSubscription(email))
        self.all: list[cloudwatch.Alarm] = []

    def add(
        self,
        id: str,
        what: cloudwatch.IMetric,
        threshold: float,
        description: str,
        *,
        minutes: int = 1,
        below: bool = False,
        missing: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
    ) -> None:
        """An alarm whose topic is told when it starts and when it is over."""
        compare = cloudwatch.ComparisonOperator
        alarm = cloudwatch.Alarm(
            self,
            id,
            metric=what,
            threshold=threshold,
            alarm_description=f"{description} See docs/runbook.md#{id.lower()}.",
            comparison_operator=compare.LESS_THAN_THRESHOLD
            if below
            else compare.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            evaluation_periods=minutes,
            treat_missing_data=missing,
        )
        alarm.add_alarm_action(actions.SnsAction(self.topic))
        alarm.add_ok_action(actions.SnsAction(self.topic))
        if isinstance(
            what, cloudwatch.MathExpression
        ):  # which the emulator refuses, so nothing may point at it
            resource = alarm.node.default_child
            assert isinstance(resource, CfnResource)
            resource.cfn_options.condition = self._emulator.no
        else:
            self.all.append(alarm)

    def watch_queues(self, queues: Queues) -> None:
        """Age of ready runs and of permits, dead permits, and the scaler's silence."""
        metric = self._metrics.of_pool
        for pool in queues.of:
            name = pool.capitalize()
            self.add(
                f"ReadyAge{name}",
                metric("OldestReadyAge", pool),
                READY_AGE_S,
                f"A run of the pool {pool} has waited five minutes for an executor.",
                minutes=3,
            )
            self.add(
                f"PermitAge{name}",
                queues.of[pool].metric_approximate_age_of_oldest_message(
                    period=Duration.minutes(1), statistic="Maximum"
                ),
                PERMIT_AGE_S,
                f"A permit of the pool {pool} is older than any run's.",
            )
            self.add(
                f"DeadPermits{name}",
                metric("DeadPermits", pool, "Sum"),
                1,
                f"Executors of the pool {pool} die with their permits.",
            )
            self.add(
                f"DeadPermitsStay{name}",
                queues.dead[pool].metric_approximate_number_of_messages_visible(
                    period=Duration.minutes(1), statistic="Maximum"
                ),
                1,
                f"Dead permits of the pool {pool} are not consumed.",
                minutes=10,
            )
            self.add(
                f"ScalerSilent{name}",
                metric("OldestReadyAge", pool, "SampleCount"),
                1,
                "The scaler publishes nothing, so the fleet does not grow.",
                minutes=5,
                below=True,
                missing=cloudwatch.TreatMissingData.BREACHING,
            )

    def watch_database(self, database: Database, size: Size) -> None:
        """What makes PostgreSQL slow or fail."""
        self.add(
            "OldestTransaction",
            self._metrics.of_service("OldestTransactionAge", "sweeper"),
            TRANSACTION_AGE_S,
            "A transaction has been open for two minutes: it holds a snapshot, which slows every claim.",
        )
        for alarm_id, name, threshold, description, below, minutes in (
            (
                "DatabaseConnections",
                "DatabaseConnections",
                0.85 * size.database_max_connections,
                "Nearly all database connections are in use.",
                False,
                3,
            ),
            ("DatabaseCpu", "CPUUtilization", 85, "The database's CPU has no room.", False, 10),
            (
                "DatabaseStorage",
                "FreeStorageSpace",
                5 * 1024**3,
                "The database has less than 5 GiB.",
                True,
                5,
            ),
        ):
            if name == "FreeStorageSpace" and database.is_cluster:
                continue  # Aurora's storage grows by itself
            self.add(
                alarm_id,
                cloudwatch.Metric(
                    namespace="AWS/RDS",
                    metric_name=name,
                    dimensions_map=database.dimension,
                    statistic="Minimum" if below else "Maximum",
                    period=Duration.minutes(1),
                ),
                threshold,
                description,
                below=below,
                minutes=minutes,
            )

    def watch_cache(self, cache: Cache) -> None:
        """Redis without memory drops streams, which clients notice as a resync; without CPU, everything is late."""
        for alarm_id, name, statistic, threshold, description in (
            (
                "CacheMemory",
                "DatabaseMemoryUsagePercentage",
                "Maximum",
                90,
                "Redis is nearly full: the oldest streams go first.",
            ),
            (
                "CacheEvictions",
                "Evictions",
                "Sum",
                1,
                "Redis drops streams: their clients lose token deltas.",
            ),
            ("CacheCpu", "EngineCPUUtilization", "Maximum", 85, "Redis' one thread has no room."),
        ):
            nodes = {
                f"node{number}": cloudwatch.Metric(
                    namespace="AWS/ElastiCache",
                    metric_name=name,
                    dimensions_map={"CacheClusterId": node},
                    statistic=statistic,
                    period=MINUTE,
                )
                for number, node in enumerate(cache.node_ids)
            }
            most = cloudwatch.MathExpression(
                expression="MAX([{}])".format(", ".join(nodes)), using_metrics=nodes, period=MINUTE
            )
            self.add(alarm_id, most if len(nodes) > 1 else nodes["node0"], threshold, description, minutes=5)

    def watch_service(self, name: str, service: ecs.FargateService) -> None:
        """Whether ECS has started as many tasks as it was asked for."""
        counts = {
            what: cloudwatch.Metric(
                namespace="ECS/ContainerInsights",
                metric_name=f"{what.capitalize()}TaskCount",
                dimensions_map={
                    "ClusterName": service.cluster.cluster_name,
                    "ServiceName": service.service_name,
                },
                statistic="Average",
                period=MINUTE,
            )
            for what in ("desired", "running")
        }
        self.add(
            f"{name}Missing",
            cloudwatch.MathExpression(
                expression="desired - running", using_metrics=dict(counts), period=MINUTE
            ),
            1,
            f"Tasks of the service {name} do not start, or end.",
            minutes=15,
        )

    def watch_hosts(self, hosts: Hosts) -> None:
        """Whether there are machines, and room on them for sandboxes."""
        self.add(
            "RoomWaitHosts",
            self._metrics.of_pool("OldestRoomWait", "hosts"),
            READY_AGE_S,
            "A run has waited five minutes for room for its sandbox on a host.",
            minutes=3,
        )
        if hosts.least:
            self.add(
                "HostsMissing",
                cloudwatch.Metric(
                    namespace="AWS/AutoScaling",
                    metric_name="GroupInServiceInstances",
                    dimensions_map={"AutoScalingGroupName": hosts.group_name},
                    statistic="Minimum",
                    period=MINUTE,
                ),
                hosts.least,
                "Fewer Docker hosts work than there should always be.",
                minutes=20,
                below=True,
            )

    def watch_api(self, api: Api, function: lambda_.Function, gateway: Gateway) -> None:
        """What callers see."""
        minute = MINUTE
        self.add(
            "ApiErrors",
            api.rest.metric_server_error(period=minute, statistic="Sum"),
            5,
            "The API answers 5xx.",
            minutes=3,
        )
        self.add(
            "ApiLatency",
            # The function's own: API Gateway's is to the end of a stream, which lasts as long as its run.
            function.metric_duration(period=minute, statistic="p50"),
            5_000,
            "Half of the requests that neither wait nor stream take more than five seconds.",
            minutes=10,
        )
        self.add(
            "GatewayTargets",
            gateway.targets.metrics.unhealthy_host_count(period=minute, statistic="Maximum"),
            1,
            "A gateway does not answer its health check.",
            minutes=5,
        )
        self.add(
            "GatewayNone",
            gateway.targets.metrics.healthy_host_count(period=minute, statistic="Minimum"),
            1,
            "No gateway answers: nothing streams, and no run can be waited for.",
            minutes=2,
            below=True,
        )
        self.add(
            "GatewayErrors",
            gateway.targets.metrics.http_code_target(
                elb.HttpCodeTarget.TARGET_5XX_COUNT, period=minute, statistic="Sum"
            ),
            5,
            "Gateways answer 5xx.",
            minutes=3,
        )

    def watch_functions(self, functions: Iterable[lambda_.Function]) -> None:
        """Calls that failed, and calls that were refused because the reserved concurrency was in use."""
        for function in functions:
            name = function.node.id
            self.add(
                f"{name}Errors",
                function.metric_errors(period=Duration.minutes(5), statistic="Sum"),
                3,
                f"The function {name} fails.",
            )
            self.add(
                f"{name}Throttles",
                function.metric_throttles(period=Duration.minutes(5), statistic="Sum"),
                10,
                f"The function {name} is called more often at once than its reserved concurrency.",
            )
