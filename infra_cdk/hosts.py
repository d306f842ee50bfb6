"""Docker hosts: an auto scaling group of machines with an engine, the sandbox host daemon, and an executor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aws_cdk import Aws, CfnResource, Duration, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from sandfleet.infra_cdk.deployment import ROOT, TEMPLATES, Deployment
from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.executors import DRAIN_GRACE_S, PROJECT, STOP_S, executor_environment
from sandfleet.infra_cdk.image import Image
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import HOST_PORT, Network, private
from sandfleet.infra_cdk.sizes import Size
from sandfleet.infra_cdk.telemetry import COMMAND, CONFIG, Telemetry

DRAIN = Duration.minutes(5)
"""How long a machine that is to go may drain: its executor, then the daemon; then AWS takes it."""
SPOT_NOTICE_S = 120
"""What AWS leaves a Spot instance."""
DATA = "/var/lib/sandfleet"
START = Duration.minutes(15)
"""How long a machine may take until daemon and executor answer: packages, images, and the graphs. Then it is replaced."""
SICK = Duration.minutes(5)
"""How long they may then be silent until the machine says that it is unhealthy."""
GROUP = "HostsGroup"
"""Logical id of the group, which a machine's signal to CloudFormation names."""
METRICS = {"HOST_METRICS": "127.0.0.1:9465", "EXECUTOR_METRICS": "127.0.0.1:9464"}
"""Where daemon and executor serve their metrics: to this machine alone."""
LIKE: Mapping[str, tuple[str, ...]] = {
    "t3": ("t3a", "m6a", "m6i"),
    "m7a": ("m6a", "m7i", "m6i"),
    "t4g": ("m7g", "m6g"),
    "m7g": ("m8g", "m6g"),
}
"""Families with as many vCPUs and as much memory at the same size: with Spot the group takes what AWS has most of."""
_SESSIONS = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)


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
        telemetry: Telemetry,
        emulator: Emulator,
    ) -> None:
        super().__init__(scope, id)
        self.least, self.most = size.hosts
        self._size = size
        self.role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"))
        self.logs = log_group(self, "Logs", size)
        self.logs.grant_write(self.role)
        telemetry.grant(self.role)
        self._secrets = deployment.secrets
        self._stopping = SPOT if deployment.spot else ON_DEMAND
        for name, source in deployment.secrets.items():
            secretsmanager.Secret.from_secret_name_v2(
                self, f"Secret{name}", source.rpartition(":")[0]
            ).grant_read(self.role)
        host, executor, base = (Image(self, part, deployment) for part in ("host", "executor", "sandbox"))
        for image in (host, executor, base):
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
            user_data=ec2.UserData.custom(
                self._start(
                    {
                        "HOST_IMAGE": host.uri,
                        "EXECUTOR_IMAGE": executor.uri,
                        "SANDBOX_BASE": base.uri,
                        "COLLECTOR_IMAGE": telemetry.image,
                        "COLLECTOR_COMMAND": COMMAND,
                    },
                    f"{CONFIG}={telemetry.config(tuple(METRICS.values()))}" if telemetry.image else "",
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
            **self._machines(template, size.host_class[deployment.architecture], deployment),
            min_capacity=self.least,
            max_capacity=self.most,
            group_metrics=[autoscaling.GroupMetrics.all()],
            health_checks=autoscaling.HealthChecks.ec2(grace_period=Duration.minutes(5)),
            # One after the other, and only once the new one works: each says so itself (see launched.sh).
            update_policy=autoscaling.UpdatePolicy.rolling_update(
                max_batch_size=1,
                min_instances_in_service=self.least,
                wait_on_resource_signals=True,
                pause_time=_with_margin(START),
            ),
            signals=autoscaling.Signals.wait_for_min_capacity(timeout=_with_margin(START))
            if self.least
            else None,
            capacity_rebalance=deployment.spot,
            max_instance_lifetime=Duration.days(30),
            default_instance_warmup=Duration.seconds(120),
            # Until the scaler has looked at them: it protects those with runs or sandboxes, and gives the others free.
            new_instances_protected_from_scale_in=True,
        )
        self.group_name = emulator.choose("emulated", self.group.auto_scaling_group_name)
        resource = self.group.node.default_child
        assert isinstance(resource, CfnResource)
        resource.override_logical_id(GROUP)
        # Out of service until it says that it works; one that never does is replaced.
        self.group.add_lifecycle_hook(
            "Launch",
            lifecycle_transition=autoscaling.LifecycleTransition.INSTANCE_LAUNCHING,
            heartbeat_timeout=_with_margin(START),
            default_result=autoscaling.DefaultResult.ABANDON,
            lifecycle_hook_name="launch",
        )
        if deployment.warm_hosts:
            self.group.add_warm_pool(pool_state=autoscaling.PoolState.STOPPED, min_size=deployment.warm_hosts)
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
                actions=["autoscaling:CompleteLifecycleAction", "autoscaling:SetInstanceHealth"],
                resources=[self.group_arn],
            )
        )
        self.role.add_to_policy(
            iam.PolicyStatement(actions=["cloudformation:SignalResource"], resources=[Aws.STACK_ID])
        )
        # Session Manager: the only way in, for whoever is on call.
        self.role.add_to_policy(iam.PolicyStatement(actions=list(_SESSIONS), resources=["*"]))
        self.role.add_to_policy(
            iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingInstances"], resources=["*"])
        )

    def _machines(
        self, template: ec2.LaunchTemplate, instance_type: str, deployment: Deployment
    ) -> dict[str, Any]:
        """What the group starts: one type, or with Spot several that are alike, beside the least on demand."""
        if not deployment.spot:
            return {"launch_template": template}
        family, _, of = instance_type.partition(".")
        return {
            "mixed_instances_policy": autoscaling.MixedInstancesPolicy(
                launch_template=template,
                launch_template_overrides=[
                    autoscaling.LaunchTemplateOverrides(instance_type=ec2.InstanceType(f"{name}.{of}"))
                    for name in (family, *LIKE[family])
                ],
                instances_distribution=autoscaling.InstancesDistribution(
                    on_demand_base_capacity=self.least,
                    on_demand_percentage_above_base_capacity=0,
                    spot_allocation_strategy=autoscaling.SpotAllocationStrategy.PRICE_CAPACITY_OPTIMIZED,
                ),
            )
        }

    def _start(
        self,
        images: dict[str, str],
        collector_environment: str,
        host_environment: dict[str, str],
        executor_environment: dict[str, str],
    ) -> str:
        """The script that a machine runs once: values in front, then ``user_data.sh``, which has no template syntax."""
        values = {
            "REGION": Aws.REGION,
            "LOG_GROUP": self.logs.log_group_name,
            **images,
            **METRICS,
            "STACK": Aws.STACK_NAME,
            "GROUP": GROUP,
            "START_S": str(START.to_seconds()),
            "SICK_S": str(SICK.to_seconds()),
            "HOST_PORT": str(HOST_PORT),
            "EXECUTOR_STOP_S": str(self._stopping.executor_s),
            "HOST_STOP_S": str(self._stopping.host_s),
            "DATA": DATA,
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
        lines.append(f"COLLECTOR_ENVIRONMENT={_quoted(collector_environment)}")
        lines.append(f"SECRETS={_quoted(json.dumps(self._secrets))}")
        # AWS takes 16 KiB, and a machine reads no comments.
        script = (ROOT / "infra_cdk" / "user_data.sh").read_text().splitlines()
        lines += [line for line in script if not line.startswith("# ")]
        return "\n".join(lines)


def _with_margin(duration: Duration) -> Duration:
    """For who waits for a machine that waits for as long: its word must come first."""
    return duration.plus(Duration.minutes(5))


def _quoted(value: str) -> str:
    """In single quotes; values that CloudFormation fills in have none."""
    return "'" + value.replace("'", "'\\''") + "'"
