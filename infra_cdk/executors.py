"""Executors on Fargate."""

import json

from aws_cdk import Duration
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from sandfleet.infra_cdk.connections import EXECUTOR_POOL
from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.image import Image
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import Network, private
from sandfleet.infra_cdk.sizes import Size
from sandfleet.infra_cdk.tasks import cpu_architecture

STOP_S = 120
"""``stopTimeout``: the most that Fargate allows between SIGTERM and SIGKILL."""
DRAIN_GRACE_S = 90
"""How long runs may finish within that; the rest is for handing over those that did not."""
PROJECT = "/srv/project"
"""Where images have the user's project."""


def executor_environment(deployment: Deployment, size: Size, pool: str) -> dict[str, str]:
    """Settings of an executor, on Fargate or on a host."""
    return {
        **deployment.environment,
        "SANDFLEET_PROJECT": f"{PROJECT}/{deployment.project.name}",
        "SANDFLEET_POOL": pool,
        "SANDFLEET_GRAPHS": json.dumps(deployment.graphs_of(pool)),
        "SANDFLEET_SLOTS": str(size.slots),
        "SANDFLEET_EXECUTOR_POOL_SIZE": str(EXECUTOR_POOL),
        "SANDFLEET_DRAIN_GRACE_S": str(DRAIN_GRACE_S),
    }


class Executors(Construct):
    """The service of the pool ``default``."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        deployment: Deployment,
        size: Size,
        network: Network,
        cluster: ecs.Cluster,
        environment: dict[str, str],
    ) -> None:
        super().__init__(scope, id)
        self.least, self.most = size.executors
        self.task = ecs.FargateTaskDefinition(
            self,
            "Task",
            cpu=size.executor_cpu,
            memory_limit_mib=size.executor_mib,
            runtime_platform=cpu_architecture(deployment),
        )
        container = self.task.add_container(
            "executor",
            image=Image(self, "executor", deployment).container,
            environment={**executor_environment(deployment, size, "default"), **environment},
            secrets={
                name: ecs.Secret.from_secrets_manager(
                    secretsmanager.Secret.from_secret_name_v2(
                        self, f"Secret{name}", source.rpartition(":")[0]
                    ),
                    source.rpartition(":")[2],
                )
                for name, source in deployment.secrets.items()
            },
            logging=ecs.LogDrivers.aws_logs(
                stream_prefix="executor", log_group=log_group(self, "Logs", size)
            ),
            stop_timeout=Duration.seconds(STOP_S),
            readonly_root_filesystem=True,
        )
        self.task.add_volume(name="tmp")
        container.add_mount_points(
            ecs.MountPoint(container_path="/tmp", source_volume="tmp", read_only=False)
        )
        self.service = ecs.FargateService(
            self,
            "Service",
            cluster=cluster,
            task_definition=self.task,
            # No desired count: a deployment would set the fleet back to it. A new service starts with one task, and
            # scaling brings it to its least.
            # A rolling update starts new executors beside the old ones, which hand over what they do not finish.
            min_healthy_percent=100,
            max_healthy_percent=size.executors_max_percent(),
            circuit_breaker=ecs.DeploymentCircuitBreaker(rollback=True),
            security_groups=[network.executors],
            vpc_subnets=private(network.vpc),
            capacity_provider_strategies=[
                # The least is on demand: without Spot capacity there would be no executor at all.
                ecs.CapacityProviderStrategy(capacity_provider="FARGATE", base=self.least, weight=0),
                ecs.CapacityProviderStrategy(capacity_provider="FARGATE_SPOT", weight=1),
            ]
            if deployment.spot
            else [ecs.CapacityProviderStrategy(capacity_provider="FARGATE", weight=1)],
        )
        # An executor protects its own task while it has runs: the service may then not take it when it scales in.
        self.task.task_role.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["ecs:UpdateTaskProtection", "ecs:GetTaskProtection"],
                resources=[cluster.arn_for_tasks("*")],
            )
        )
