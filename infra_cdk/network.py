"""The network: private machines, one way out, nothing that can be reached from the internet."""

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.sizes import Size

HOST_PORT = 8700
"""TCP port of the sandbox host daemon."""
GATEWAY_PORT = 8123
POSTGRES_PORT = 5432
REDIS_PORT = 6379


class Network(Construct):
    """A VPC, and a security group per part.

    ``isolated`` subnets hold the data and have no route out; ``private`` ones reach the internet through NAT, which
    executors need for model providers.
    """

    def __init__(self, scope: Construct, id: str, size: Size, zones: tuple[str, ...]) -> None:
        super().__init__(scope, id)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            max_azs=size.zones,
            nat_gateways=size.nat_gateways,
            restrict_default_security_group=False,  # would cost a function; no part uses that group
            subnet_configuration=[
                ec2.SubnetConfiguration(
                    name="public",
                    subnet_type=ec2.SubnetType.PUBLIC,
                    cidr_mask=24,
                    map_public_ip_on_launch=False,
                ),
                ec2.SubnetConfiguration(
                    name="private", subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS, cidr_mask=20
                ),
                ec2.SubnetConfiguration(
                    name="isolated", subnet_type=ec2.SubnetType.PRIVATE_ISOLATED, cidr_mask=24
                ),
            ],
        )
        for subnets in (self.vpc.public_subnets, self.vpc.private_subnets, self.vpc.isolated_subnets):
            for subnet, zone in zip(subnets, zones, strict=False):
                # CDK takes the first zones of the region, and in some of them VPC links or a type of instance are missing.
                resource = subnet.node.default_child
                assert isinstance(resource, ec2.CfnSubnet)
                resource.availability_zone = zone
        # Free of charge, and S3 traffic (snapshots, image layers) stays off the NAT.
        self.vpc.add_gateway_endpoint("S3", service=ec2.GatewayVpcEndpointAwsService.S3)
        self.vpc.add_flow_log(
            "FlowLog",
            destination=ec2.FlowLogDestination.to_cloud_watch_logs(log_group(self, "FlowLogs", size)),
            traffic_type=ec2.FlowLogTrafficType.REJECT,
        )

        self.link = self._group("Link", "VPC link of API Gateway")
        self.balancer = self._group("Balancer", "load balancer of the gateway")
        self.gateway = self._group("Gateway", "gateway tasks")
        self.functions = self._group("Functions", "Lambdas")
        self.executors = self._group("Executors", "executors on Fargate")
        self.hosts = self._group("Hosts", "Docker hosts")
        self.database = self._group("Database", "PostgreSQL", egress=False)
        self.proxy = self._group("Proxy", "RDS Proxy")
        self.cache = self._group("Cache", "Redis", egress=False)

        self._allow(self.link, self.balancer, 80, "API Gateway")
        self._allow(self.balancer, self.gateway, GATEWAY_PORT, "load balancer")
        # CDK itself lets the proxy reach the database; AWS refuses a rule that is there twice.
        self._allow(self.functions, self.proxy, POSTGRES_PORT, "Lambdas")
        users = (("gateway", self.gateway), ("executors", self.executors), ("hosts", self.hosts))
        for name, source in (*users, ("Lambdas", self.functions)):
            self._allow(source, self.database, POSTGRES_PORT, name)
            self._allow(source, self.cache, REDIS_PORT, name)
        for name, source in users:
            # Runs use sandboxes, also those of another host than their executor's, and the gateway serves /sandboxes.
            self._allow(source, self.hosts, HOST_PORT, name)

    def _group(self, id: str, description: str, *, egress: bool = True) -> ec2.SecurityGroup:
        return ec2.SecurityGroup(self, id, vpc=self.vpc, description=description, allow_all_outbound=egress)

    def _allow(self, source: ec2.SecurityGroup, target: ec2.SecurityGroup, port: int, name: str) -> None:
        target.add_ingress_rule(source, ec2.Port.tcp(port), name)


def private(vpc: ec2.IVpc) -> ec2.SubnetSelection:
    """Subnets that reach the internet and are not reached from it."""
    return ec2.SubnetSelection(subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS)


def isolated(vpc: ec2.IVpc) -> ec2.SubnetSelection:
    """Subnets without a way in or out."""
    return ec2.SubnetSelection(subnet_type=ec2.SubnetType.PRIVATE_ISOLATED)
