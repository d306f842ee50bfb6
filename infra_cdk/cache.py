"""Redis: streams, rings, cancel keys. Nothing in it is the only copy of anything, so it has no backups."""

from aws_cdk import Aws, RemovalPolicy
from aws_cdk import aws_elasticache as elasticache
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.network import REDIS_PORT, Network
from sandfleet.infra_cdk.sizes import Size


class Cache(Construct):
    """Valkey with cluster mode off: MGET and XREAD of many keys would cross slots otherwise."""

    def __init__(self, scope: Construct, id: str, size: Size, network: Network, emulator: Emulator) -> None:
        super().__init__(scope, id)
        self.secret = secretsmanager.Secret(
            self,
            "Password",
            description="Password of Redis",
            removal_policy=RemovalPolicy.DESTROY,
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template="{}",
                generate_string_key="redis_password",
                exclude_punctuation=True,
                password_length=64,
            ),
        )
        subnets = elasticache.CfnSubnetGroup(
            self,
            "Subnets",
            description="Isolated subnets",
            subnet_ids=[subnet.subnet_id for subnet in network.vpc.isolated_subnets],
        )
        parameters = elasticache.CfnParameterGroup(
            self,
            "Parameters",
            cache_parameter_group_family="valkey8",
            description="Keys have a time to live: when memory runs out, those that end first go first",
            properties={"maxmemory-policy": "volatile-ttl"},
        )
        group = elasticache.CfnReplicationGroup(
            self,
            "Valkey",
            replication_group_description=f"{Aws.STACK_NAME} streams, rings and cancel keys",
            engine="valkey",
            engine_version="8.1",
            cache_node_type=size.cache_class,
            cluster_mode="disabled",
            num_cache_clusters=2 if size.standby else 1,
            automatic_failover_enabled=size.standby,
            multi_az_enabled=size.standby,
            cache_subnet_group_name=subnets.ref,
            cache_parameter_group_name=parameters.ref,
            security_group_ids=[network.cache.security_group_id],
            port=REDIS_PORT,
            at_rest_encryption_enabled=True,
            transit_encryption_enabled=True,
            auth_token=self.secret.secret_value_from_json("redis_password").unsafe_unwrap(),
            snapshot_retention_limit=0,
        )
        nodes = range(1, 3 if size.standby else 2)
        self.node_ids = [emulator.export(f"CacheId{n}", "none", f"{group.ref}-{n:03}") for n in nodes]
        """CloudWatch's names of the nodes: which of them is the primary changes."""
        self.url = emulator.export(
            "RedisUrl",
            emulator.parameter("RedisUrl", "URL of a Redis server that exists."),
            f"rediss://{group.attr_primary_end_point_address}:{REDIS_PORT}/0",
        )
        """Without the password, which processes take from `secret`."""
