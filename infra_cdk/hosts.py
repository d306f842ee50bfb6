"""Docker hosts: an auto scaling group of machines with an engine, the sandbox host daemon, and an executor."""

import json
from dataclasses import dataclass

from aws_cdk import Aws, Duration, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from sandfleet.infra_cdk.deployment import ROOT, Deployment
from sandfleet.infra_cdk.executors import DRAIN_GRACE_S, PROJECT, STOP_S, executor_environment
from sandfleet.infra_cdk.image import Image
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import HOST_PORT, Network, private
from sandfleet.infra_cdk.packaging import TEMPLATES
from sandfleet.infra_cdk.sizes import Size

DRAIN = Duration.minutes(5)
"""How long a machine that is to go may drain: its executor, then the daemon; then AWS takes it."""
SPOT_NOTICE_S = 120
"""What AWS leaves a Spot instance."""
DATA = "/var/lib/sandfleet"
SANDBOX_BASE = "python:3.13-slim"
"""What the image of the default sandbox template is made from."""


@dataclass(frozen=True)
class Stopping:
    """Seconds that executor and daemon are given, one after the other: for what is under way, and until they are killed,
    which leaves runs to be handed over and workspaces to be kept as snapshots."""

    executor_grace_s: int
    executor_s: int
    host_grace_s: int
    host_s: int


ON_DEMAND = Stopping(executor_grace_s=DRAIN_GRACE_S, executor_s=STOP_S, host_grace_s=60, host_s=100)
SPOT = Stopping(executor_grace_s=45, executor_s=55, host_grace_s=15, host_s=55)
"""Together less than `SPOT_NOTICE_S`, of which up to 5 s pass before the machine looks."""


class Hosts(Construct):
    """``group`` and its ``role``."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        deployment: Deployment,
        size: Size,
        network: Network,
        environment: dict[str, str],
        bucket: str,
    ) -> None:
        super().__init__(scope, id)
        self.least, self.most = size.hosts
        self._size = size
        self.role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        self.logs = log_group(self, "Logs", size)
        self.logs.grant_write(self.role)
        self._secrets = deployment.secrets
        self._stopping = SPOT if deployment.spot else ON_DEMAND
        for name, source in deployment.secrets.items():
            secretsmanager.Secret.from_secret_name_v2(
                self, f"Secret{name}", source.rpartition(":")[0]
            ).grant_read(self.role)
        host, executor = Image(self, "host", deployment), Image(self, "executor", deployment)
        for image in (host, executor):
            if image.asset is not None:
                image.asset.repository.grant_pull(self.role)
        templates = deployment.project.parent / TEMPLATES
        arm = deployment.architecture == "arm64"
        template = ec2.LaunchTemplate(
            self,
            "Template",
            instance_type=ec2.InstanceType(size.host_class[deployment.architecture]),
            machine_image=ec2.MachineImage.latest_amazon_linux2023(
                cpu_type=ec2.AmazonLinuxCpuType.ARM_64 if arm else ec2.AmazonLinuxCpuType.X86_64
            ),
            role=self.role,
            security_group=network.hosts,
            # One hop: a container's request for credentials does not come back. Sandboxes have no route there either.
            require_imdsv2=True,
            http_put_response_hop_limit=1,
            http_tokens=ec2.LaunchTemplateHttpTokens.REQUIRED,
            detailed_monitoring=True,
            block_devices=[
                ec2.BlockDevice(
                    device_name="/dev/xvda",
                    volume=ec2.BlockDeviceVolume.ebs(
                        size.host_gib, encrypted=True, volume_type=ec2.EbsDeviceVolumeType.GP3
                    ),
                )
            ],
            spot_options=ec2.LaunchTemplateSpotOptions() if deployment.spot else None,
            user_data=ec2.UserData.custom(
                self._start(
                    host.uri,
                    executor.uri,
                    host_environment={
                        **environment,
                        "SANDFLEET_SNAPSHOT_BUCKET": bucket,
                        "SANDFLEET_HOST_DRAIN_GRACE_S": str(self._stopping.host_grace_s),
                        **({"SANDFLEET_TEMPLATES": f"{PROJECT}/{TEMPLATES}"} if templates.is_file() else {}),
                    },
                    executor_environment={
                        **executor_environment(deployment, size, "hosts"),
                        **environment,
                        "SANDFLEET_DRAIN_GRACE_S": str(self._stopping.executor_grace_s),
                    },
                )
            ),
        )
        self.group = autoscaling.AutoScalingGroup(
            self,
            "Group",
            vpc=network.vpc,
            vpc_subnets=private(network.vpc),
            launch_template=template,
            min_capacity=self.least,
            max_capacity=self.most,
            group_metrics=[autoscaling.GroupMetrics.all()],
            health_checks=autoscaling.HealthChecks.ec2(grace_period=Duration.minutes(5)),
            update_policy=autoscaling.UpdatePolicy.rolling_update(
                max_batch_size=1, min_instances_in_service=self.least
            ),
            capacity_rebalance=deployment.spot,
            max_instance_lifetime=Duration.days(30),
            default_instance_warmup=Duration.seconds(120),
            # Until the scaler has looked at them: it protects those with runs or sandboxes, and gives the others free.
            new_instances_protected_from_scale_in=True,
        )
        # The machine itself watches for this (see drain.sh) and says when it has drained.
        self.group.add_lifecycle_hook(
            "Drain",
            lifecycle_transition=autoscaling.LifecycleTransition.INSTANCE_TERMINATING,
            heartbeat_timeout=DRAIN,
            default_result=autoscaling.DefaultResult.CONTINUE,
            lifecycle_hook_name="drain",
        )
        # By the stack's prefix: the group's own name would make a circle of group, template and role.
        self.group_arn = Stack.of(self).format_arn(
            service="autoscaling",
            resource="autoScalingGroup:*:autoScalingGroupName",
            resource_name=f"{Aws.STACK_NAME}-*",
        )
        self.role.add_to_policy(
            iam.PolicyStatement(
                actions=["autoscaling:CompleteLifecycleAction"],
                resources=[self.group_arn],
            )
        )
        self.role.add_to_policy(
            iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingInstances"], resources=["*"])
        )

    def _start(
        self,
        host_image: str,
        executor_image: str,
        host_environment: dict[str, str],
        executor_environment: dict[str, str],
    ) -> str:
        """The script that a machine runs once: values in front, then ``user_data.sh``, which has no template syntax."""
        values = {
            "REGION": Aws.REGION,
            "LOG_GROUP": self.logs.log_group_name,
            "HOST_IMAGE": host_image,
            "EXECUTOR_IMAGE": executor_image,
            "HOST_PORT": str(HOST_PORT),
            "EXECUTOR_STOP_S": str(self._stopping.executor_s),
            "HOST_STOP_S": str(self._stopping.host_s),
            "DATA": DATA,
            "SANDBOX_BASE": SANDBOX_BASE,
        }
        lines = ["#!/bin/bash"]
        lines += [f"{name}={_quoted(value)}" for name, value in values.items()]
        for name, variables in (
            ("HOST_ENVIRONMENT", host_environment),
            ("EXECUTOR_ENVIRONMENT", executor_environment),
        ):
            # A line per variable, as `docker run --env-file` reads them.
            text = "\n".join(f"{key}={value}" for key, value in sorted(variables.items()))
            lines.append(f"{name}=$(cat <<'END_OF_VARIABLES'\n{text}\nEND_OF_VARIABLES\n)")
        lines.append(f"SECRETS={_quoted(json.dumps(self._secrets))}")
        lines.append((ROOT / "infra_cdk" / "user_data.sh").read_text())
        return "\n".join(lines)


def _quoted(value: str) -> str:
    """In single quotes; values that CloudFormation fills in have none."""
    return "'" + value.replace("'", "'\\''") + "'"
