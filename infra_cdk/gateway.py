"""The streaming gateway: the API's application as a service behind a private load balancer."""

from aws_cdk import Duration, Fn
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from constructs import Construct

from sandfleet.infra_cdk.connections import GATEWAY_POOL, GATEWAYS_MAX_PERCENT
from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.image import Image
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import GATEWAY_PORT, Network, private
from sandfleet.infra_cdk.paths import STAGE_PREFIX
from sandfleet.infra_cdk.sizes import Size
from sandfleet.infra_cdk.tasks import cpu_architecture

_STOP = Duration.seconds(30)
"""Streams close at once when the gateway is told to stop, and their clients come back to another one."""


class Gateway(Construct):
    """``service`` and ``balancer``; ``url`` is the load balancer's address within the network.

    An emulator's load balancer has no name in DNS: its requests go by a path of the emulator's own ``endpoint``.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        deployment: Deployment,
        size: Size,
        network: Network,
        cluster: ecs.Cluster,
        environment: dict[str, str],
        emulator: Emulator,
        endpoint: str,
    ) -> None:
        super().__init__(scope, id)
        self.task = ecs.FargateTaskDefinition(
            self, "Task", cpu=512, memory_limit_mib=1024, runtime_platform=cpu_architecture(deployment)
        )
        container = self.task.add_container(
            "gateway",
            image=Image(self, "gateway", deployment).container,
            environment={
                **environment,
                "SANDFLEET_API_HOST": "0.0.0.0",
                "SANDFLEET_API_PORT": str(GATEWAY_PORT),
                "SANDFLEET_API_PREFIX": STAGE_PREFIX,
                "SANDFLEET_API_POOL_SIZE": str(GATEWAY_POOL),
            },
            logging=ecs.LogDrivers.aws_logs(stream_prefix="gateway", log_group=log_group(self, "Logs", size)),
            readonly_root_filesystem=True,
            stop_timeout=_STOP,
        )
        container.add_port_mappings(ecs.PortMapping(container_port=GATEWAY_PORT))
        container.add_mount_points(
            ecs.MountPoint(container_path="/tmp", source_volume="tmp", read_only=False)
        )
        self.task.add_volume(name="tmp")
        least, most = size.gateways
        self.service = ecs.FargateService(
            self,
            "Service",
            cluster=cluster,
            task_definition=self.task,
            # No desired count: see Executors. Registering the target below brings a new service to its least.
            min_healthy_percent=100,
            max_healthy_percent=GATEWAYS_MAX_PERCENT,
            circuit_breaker=ecs.DeploymentCircuitBreaker(rollback=True),
            security_groups=[network.gateway],
            vpc_subnets=private(network.vpc),
            health_check_grace_period=Duration.seconds(60),
        )
        self.balancer = elb.ApplicationLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            vpc_subnets=private(network.vpc),
            internet_facing=False,
            security_group=network.balancer,
            deletion_protection=deployment.protected,
            drop_invalid_header_fields=True,
            # Above the 15 s of a stream's heartbeats, and below the 75 s after which the gateway closes a connection that
            # is idle: whoever may send the next request must be the first to close.
            idle_timeout=Duration.seconds(60),
        )
        listener = self.balancer.add_listener(
            "Http", port=80, protocol=elb.ApplicationProtocol.HTTP, open=False
        )
        self.targets = listener.add_targets(
            "Gateways",
            port=GATEWAY_PORT,
            protocol=elb.ApplicationProtocol.HTTP,
            targets=[self.service],
            deregistration_delay=Duration.seconds(10),
            health_check=elb.HealthCheck(
                path="/ok",
                interval=Duration.seconds(10),
                timeout=Duration.seconds(5),
                healthy_threshold_count=2,
            ),
        )
        scaling = self.service.auto_scale_task_count(min_capacity=least, max_capacity=most)
        scaling.scale_on_cpu_utilization(
            "Cpu",
            target_utilization_percent=60,
            scale_in_cooldown=Duration.minutes(10),
            scale_out_cooldown=Duration.minutes(1),
        )
        self.url = emulator.choose(
            Fn.join("", [endpoint, "/_alb/", self.balancer.load_balancer_name]),
            Fn.join("", ["http://", self.balancer.load_balancer_dns_name]),
        )
