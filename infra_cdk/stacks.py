"""The two stacks: what holds data, and what works on it."""

from aws_cdk import App, CfnOutput, Duration, RemovalPolicy, Stack, Tags
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_secretsmanager as secretsmanager
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from sandfleet.infra_cdk import connections
from sandfleet.infra_cdk.alarms import Alarms, private_topic
from sandfleet.infra_cdk.api import Api
from sandfleet.infra_cdk.cache import Cache
from sandfleet.infra_cdk.checks import acknowledge
from sandfleet.infra_cdk.dashboard import Dashboard, Shown
from sandfleet.infra_cdk.database import Database
from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.emulated import Emulator, condition_out
from sandfleet.infra_cdk.executors import Executors
from sandfleet.infra_cdk.firewall import Firewall
from sandfleet.infra_cdk.functions import FunctionSetting, Scheduled, python_function
from sandfleet.infra_cdk.gateway import Gateway
from sandfleet.infra_cdk.hosts import Hosts
from sandfleet.infra_cdk.image import grant_pull
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.metrics import Metrics
from sandfleet.infra_cdk.migration import Migration
from sandfleet.infra_cdk.network import Network
from sandfleet.infra_cdk.queues import Queues
from sandfleet.infra_cdk.scaling import PoolScaling
from sandfleet.infra_cdk.storage import Snapshots
from sandfleet.infra_cdk.telemetry import Telemetry

ENDPOINT = "EmulatorEndpoint"


class DataStack(Stack):
    """Network, database, cache, snapshots, and the key of sandbox tokens: all that outlives a new version."""

    def __init__(self, scope: Construct, id: str, deployment: Deployment) -> None:
        super().__init__(scope, id, description="sandfleet: network and data")
        size = deployment.figures
        self.emulator = Emulator(self)
        self.network = Network(self, "Network", size, deployment.zones)
        self.database = Database(self, "Database", deployment, size, self.network, self.emulator)
        self.cache = Cache(self, "Cache", size, self.network, self.emulator)
        self.snapshots = Snapshots(self, "Snapshots", deployment)
        CfnOutput(self, "SnapshotBucket", value=self.snapshots.bucket.bucket_name)
        self.host_secret = secretsmanager.Secret(
            self,
            "HostSecret",
            description="Key of sandbox tokens",
            removal_policy=RemovalPolicy.DESTROY,
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template="{}",
                generate_string_key="host_secret",
                exclude_punctuation=True,
                password_length=64,
            ),
        )
        condition_out(self, self.emulator)


class AppStack(Stack):
    """Queues, API, executors, hosts, functions, alarms: all that a new version replaces."""

    def __init__(
        self, scope: Construct, id: str, deployment: Deployment, data: DataStack, code: lambda_.Code
    ) -> None:
        super().__init__(scope, id, description="sandfleet: API and fleet")
        self.deployment, self.data = deployment, data
        self.size = deployment.figures
        self.metrics = Metrics(deployment.name)
        self.emulator = Emulator(self)
        self.endpoint = self.emulator.parameter(
            ENDPOINT, "URL of the emulator, as Lambdas and tasks reach it."
        )
        self.queues = Queues(self, "Queues", deployment.pools)
        self.cluster = self._cluster()
        functions = FunctionSetting(
            deployment,
            self.size,
            data.network,
            code,
            self._environment(data.database.function_url),
            self.emulator,
        )
        self.telemetry = Telemetry(self, "Telemetry", deployment, self.size)
        direct = {**self._environment(data.database.url), **self.telemetry.environment}
        migration = Migration(self, "Migration", functions, data.database)
        self.gateway = Gateway(
            self,
            "Gateway",
            deployment,
            self.size,
            data.network,
            self.cluster,
            direct,
            self.emulator,
            self.endpoint,
        )
        self.telemetry.beside(self.gateway.task)
        self.gateway.service.node.add_dependency(self.insights)
        self.function = python_function(
            self,
            "ApiFunction",
            functions,
            "api.lambda_handler",
            timeout=Duration.seconds(29),
            memory_mib=1024,
            concurrency=self.size.api_concurrency,
            environment={"SANDFLEET_API_POOL_SIZE": str(self.size.api_pool)},
        )
        self.api = Api(
            self,
            "Api",
            self.size,
            data.network,
            self.function,
            self.gateway,
            self.emulator,
            own_logs_role=deployment.api_logs_role == "own",
        )
        if deployment.waf:
            Firewall(self, "Firewall", self.api, self.size)
        fleets = self._fleets(direct)
        self.scheduled = Scheduled(self, "Scheduled", functions, self.queues, self._targets(fleets))
        self._grant(fleets)
        self._scale(fleets)
        self._watch(fleets)
        migration.before(
            self.function,
            self.gateway.service,
            *self.scheduled.all,
            *(fleet.service if isinstance(fleet, Executors) else fleet.group for fleet in fleets.values()),
        )
        CfnOutput(self, "Url", value=self.api.url, description="Base URL for langgraph-sdk")
        CfnOutput(
            self,
            "KeyFunction",
            value=migration.function.function_name,
            description="Invoke with {tenant, user} for a key",
        )
        condition_out(self, self.emulator)

    def _environment(self, database_url: str) -> dict[str, str]:
        """Settings that all processes share."""
        data, choose = self.data, self.emulator.choose
        return {
            **self.deployment.settings,
            "SANDFLEET_DEPLOYMENT": self.deployment.name,
            "SANDFLEET_DATABASE_URL": database_url,
            "SANDFLEET_DATABASE_IAM": choose("false", "true"),
            "SANDFLEET_REDIS_URL": data.cache.url,
            "SANDFLEET_QUEUE_URLS": self.to_json_string(self.queues.urls()),
            "SANDFLEET_SECRET_ARNS": self.to_json_string(
                [data.cache.secret.secret_arn, data.host_secret.secret_arn]
            ),
            "SANDFLEET_AWS_REGION": self.region,
            "SANDFLEET_AWS_ENDPOINT_URL": self.endpoint,
        }

    def _cluster(self) -> ecs.Cluster:
        cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=self.data.network.vpc,
            container_insights_v2=ecs.ContainerInsights.ENABLED,
        )
        resource = cluster.node.default_child
        assert isinstance(resource, ecs.CfnCluster)
        resource.capacity_providers = ["FARGATE", "FARGATE_SPOT"]
        # Before there are tasks, whose figures would make it.
        name = f"/aws/ecs/containerinsights/{cluster.cluster_name}/performance"
        self.insights = log_group(self, "Insights", self.size, name)
        return cluster

    def _fleets(self, environment: dict[str, str]) -> dict[str, Executors | Hosts]:
        """The fleet of each pool."""
        deployment, size, network = self.deployment, self.size, self.data.network
        fleets: dict[str, Executors | Hosts] = {}
        if "default" in deployment.pools:
            fleets["default"] = Executors(
                self, "Executors", deployment, size, network, self.cluster, environment
            )
        if "hosts" in deployment.pools:
            bucket = self.data.snapshots.bucket.bucket_name
            fleets["hosts"] = Hosts(
                self, "Hosts", deployment, size, network, environment, bucket, self.telemetry, self.emulator
            )
        for fleet in fleets.values():
            if isinstance(fleet, Executors):
                self.telemetry.beside(fleet.task)
                fleet.service.node.add_dependency(self.insights)
        return fleets

    def _targets(self, fleets: dict[str, Executors | Hosts]) -> str:
        """``SANDFLEET_SCALER_TARGETS``: what runs each pool."""
        return self.to_json_string(
            {
                pool: {
                    **self._target(fleet),
                    "least": fleet.least,
                    "most": fleet.most,
                    "slots": self.size.slots,
                }
                for pool, fleet in fleets.items()
            }
        )

    def _target(self, fleet: Executors | Hosts) -> dict[str, str]:
        if isinstance(fleet, Executors):
            return {"service": f"{fleet.service.cluster.cluster_name}/{fleet.service.service_name}"}
        return {"group": fleet.group_name}

    def _grant(self, fleets: dict[str, Executors | Hosts]) -> None:
        data, gateway = self.data, self.gateway.task.task_role
        workers: list[iam.IRole] = [
            fleet.task.task_role if isinstance(fleet, Executors) else fleet.role for fleet in fleets.values()
        ]
        roles = [function.role for function in (self.function, *self.scheduled.all)]
        servers: list[iam.IRole] = [gateway, *(role for role in roles if role is not None)]
        for role in (*workers, *servers):
            data.database.grant_login(role)
            for secret in (data.cache.secret, data.host_secret):
                secret.grant_read(role)
        for role in (gateway, self.function):
            self.queues.grant_send(role)
        for worker in workers:
            self.queues.grant_work(worker)
        grant_pull(self.gateway.task.obtain_execution_role(), self.deployment, "gateway", "collector")
        for fleet in fleets.values():
            if isinstance(fleet, Hosts):
                data.snapshots.grant(fleet.role)
                grant_pull(fleet.role, self.deployment, "host", "executor", "sandbox", "collector")
            else:
                grant_pull(fleet.task.obtain_execution_role(), self.deployment, "executor", "collector")
            self._let_scale(fleet)

    def _let_scale(self, fleet: Executors | Hosts) -> None:
        """Let the scaler set the wanted number of a fleet, and see to it that busy hosts are not taken."""
        scaler = self.scheduled.scaler
        if isinstance(fleet, Executors):
            actions, arn = ["ecs:UpdateService", "ecs:DescribeServices"], fleet.service.service_arn
            scaler.add_to_role_policy(
                iam.PolicyStatement(
                    actions=["ecs:ListTasks"],
                    resources=["*"],
                    conditions={"ArnEquals": {"ecs:cluster": self.cluster.cluster_arn}},
                )
            )
        else:
            actions = ["autoscaling:SetDesiredCapacity", "autoscaling:SetInstanceProtection"]
            arn = fleet.group_arn
            # This one knows no resources.
            scaler.add_to_role_policy(
                iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingGroups"], resources=["*"])
            )
        scaler.add_to_role_policy(iam.PolicyStatement(actions=actions, resources=[arn]))

    def _scale(self, fleets: dict[str, Executors | Hosts]) -> None:
        topic = private_topic(self, "Scaling")
        topic.add_subscription(subscriptions.LambdaSubscription(self.scheduled.scaler))
        # Who sets the counts: the policies of alarms, or the scaler.
        by_policies = not self.deployment.scales_fast
        for pool, fleet in fleets.items():
            PoolScaling(
                self,
                f"Scale{pool.capitalize()}",
                pool,
                fleet,
                self.size.slots,
                self.metrics,
                topic,
                self.emulator,
                by_policies=by_policies,
            )

    def _watch(self, fleets: dict[str, Executors | Hosts]) -> None:
        alarms = Alarms(self, "Alarms", self.deployment.alarm_email, self.metrics, self.emulator)
        alarms.watch_queues(self.queues)
        alarms.watch_database(self.data.database, self.size)
        alarms.watch_cache(self.data.cache)
        alarms.watch_service("Gateways", self.gateway.service)
        for fleet in fleets.values():
            if isinstance(fleet, Hosts):
                alarms.watch_hosts(fleet)
            else:
                alarms.watch_service("Executors", fleet.service)
        alarms.watch_api(self.api, self.function, self.gateway)
        alarms.watch_functions((self.function, *self.scheduled.all))
        Dashboard(
            self,
            "Dashboard",
            self.stack_name,
            alarms,
            Shown(
                self.api,
                self.function,
                self.gateway,
                self.queues,
                self.data.database,
                self.data.cache,
                fleets,
                (self.function, *self.scheduled.all),
                self.metrics,
                self.telemetry,
            ),
        )


def add_stacks(app: App, deployment: Deployment, code: lambda_.Code) -> tuple[DataStack, AppStack]:
    """The stacks of a deployment. Raises WrongContext when its parts do not fit together."""
    connections.check(deployment, deployment.figures)
    data = DataStack(app, f"{deployment.name}-data", deployment)
    application = AppStack(app, f"{deployment.name}-app", deployment, data, code)
    for stack in (data, application):
        acknowledge(stack, deployment.name)
        Tags.of(stack).add(
            "sandfleet", deployment.name, exclude_resource_types=["AWS::RDS::DBProxyTargetGroup"]
        )
    return data, application
