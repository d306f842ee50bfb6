"""PostgreSQL: RDS or Aurora Serverless v2, and RDS Proxy for the Lambdas.

Processes log in with tokens of IAM, so there is no password to rotate but the administrator's, which RDS keeps and rotates;
only the migration reads it.
"""

from aws_cdk import Duration, Fn, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_rds as rds
from constructs import Construct

from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.network import POSTGRES_PORT, Network, isolated
from sandfleet.infra_cdk.sizes import Size

NAME = "sandfleet"
"""Of the database, and of the role that all processes but the migration log in as."""
ADMIN = "sandfleet_admin"

_PARAMETERS = {
    # A process that froze within a transaction holds its locks and its snapshot no longer than this. Processes ask for
    # less themselves; this is for operators' sessions and for RDS Proxy, through which sessions have no options.
    "idle_in_transaction_session_timeout": "60000",
    "log_lock_waits": "1",
    "log_min_duration_statement": "1000",
    "rds.force_ssl": "1",
    "jit": "0",
}


class Database(Construct):
    """The database. ``url`` is for processes that connect directly, ``function_url`` for Lambdas."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        deployment: Deployment,
        size: Size,
        network: Network,
        emulator: Emulator,
    ) -> None:
        super().__init__(scope, id)
        removal = RemovalPolicy.SNAPSHOT if deployment.kept else RemovalPolicy.DESTROY
        parameters = {**_PARAMETERS, "max_connections": str(size.database_max_connections)}
        store: rds.DatabaseCluster | rds.DatabaseInstance
        if deployment.database == "aurora":
            store = self._aurora(deployment, size, network, parameters, removal)
            host, resource_id = store.cluster_endpoint.hostname, store.cluster_resource_identifier
            target = rds.ProxyTarget.from_cluster(store)
            dimension = ("DBClusterIdentifier", store.cluster_identifier)
        else:
            store = self._instance(deployment, size, network, parameters, removal)
            host, resource_id = store.db_instance_endpoint_address, str(store.instance_resource_id)
            target = rds.ProxyTarget.from_instance(store)
            dimension = ("DBInstanceIdentifier", store.instance_identifier)
        key, identifier = dimension
        self.dimension = {key: emulator.export("DatabaseId", "none", identifier)}
        """Names the database in CloudWatch."""
        self.is_cluster = deployment.database == "aurora"
        secret = store.secret
        assert secret is not None
        nobody = self._login_arn("none")
        self.admin_secret_arn = emulator.export("AdminSecretArn", f"{nobody}-none", secret.secret_arn)
        given = emulator.parameter("DatabaseUrl", "URL of a PostgreSQL server that exists.")
        self._login_arns = [emulator.export("LoginArn", nobody, self._login_arn(resource_id))]
        self.url = emulator.export("Url", given, self._url(NAME, host))
        self.admin_url = emulator.export("AdminUrl", given, self._url(ADMIN, host))
        self.function_url = self.url
        if size.proxy:
            proxy = self._proxy(target, size, network, emulator.choose(nobody, self._login_arn(resource_id)))
            # prx-…, the last part of the proxy's ARN, is what a login is granted on.
            proxy_id = Fn.select(6, Fn.split(":", proxy.db_proxy_arn))
            self._login_arns.append(emulator.export("ProxyLoginArn", nobody, self._login_arn(proxy_id)))
            self.function_url = emulator.export("FunctionUrl", given, self._url(NAME, proxy.endpoint))

    def grant_login(self, grantee: iam.IGrantable) -> None:
        """Let a process log in as the role `NAME`."""
        grantee.grant_principal.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["rds-db:connect"],
                resources=self._login_arns,
            )
        )

    def grant_admin(self, grantee: iam.IGrantable) -> None:
        """Let a process read the administrator's password."""
        grantee.grant_principal.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["secretsmanager:GetSecretValue"],
                resources=[self.admin_secret_arn],
            )
        )

    def _login_arn(self, resource_id: str) -> str:
        stack = Stack.of(self)
        return f"arn:{stack.partition}:rds-db:{stack.region}:{stack.account}:dbuser:{resource_id}/{NAME}"

    @staticmethod
    def _url(user: str, host: str) -> str:
        return f"postgresql://{user}@{host}:{POSTGRES_PORT}/{NAME}?sslmode=require"

    def _instance(
        self,
        deployment: Deployment,
        size: Size,
        network: Network,
        parameters: dict[str, str],
        removal: RemovalPolicy,
    ) -> rds.DatabaseInstance:
        engine = rds.DatabaseInstanceEngine.postgres(version=rds.PostgresEngineVersion.VER_17_9)
        return rds.DatabaseInstance(
            self,
            "Postgres",
            engine=engine,
            instance_type=ec2.InstanceType(size.database_class),
            vpc=network.vpc,
            vpc_subnets=isolated(network.vpc),
            security_groups=[network.database],
            database_name=NAME,
            credentials=rds.Credentials.from_username(ADMIN),
            manage_master_user_password=True,
            iam_authentication=True,
            parameter_group=rds.ParameterGroup(self, "Parameters", engine=engine, parameters=parameters),
            allocated_storage=size.database_gib,
            max_allocated_storage=size.database_gib * 10,
            storage_type=rds.StorageType.GP3,
            storage_encrypted=True,
            multi_az=size.standby,
            backup_retention=Duration.days(size.backup_days),
            copy_tags_to_snapshot=True,
            deletion_protection=deployment.protected,
            removal_policy=removal,
            publicly_accessible=False,
            auto_minor_version_upgrade=True,
            ca_certificate=rds.CaCertificate.RDS_CA_RSA2048_G1,
        )

    def _aurora(
        self,
        deployment: Deployment,
        size: Size,
        network: Network,
        parameters: dict[str, str],
        removal: RemovalPolicy,
    ) -> rds.DatabaseCluster:
        engine = rds.DatabaseClusterEngine.aurora_postgres(version=rds.AuroraPostgresEngineVersion.VER_17_9)
        least, most = size.aurora_units
        readers = (
            [rds.ClusterInstance.serverless_v2("Standby", scale_with_writer=True)] if size.standby else []
        )
        return rds.DatabaseCluster(
            self,
            "Aurora",
            engine=engine,
            writer=rds.ClusterInstance.serverless_v2("Writer", publicly_accessible=False),
            readers=readers,
            serverless_v2_min_capacity=least,
            serverless_v2_max_capacity=most,
            vpc=network.vpc,
            vpc_subnets=isolated(network.vpc),
            security_groups=[network.database],
            default_database_name=NAME,
            credentials=rds.Credentials.from_username(ADMIN),
            manage_master_user_password=True,
            iam_authentication=True,
            parameter_group=rds.ParameterGroup(self, "Parameters", engine=engine, parameters=parameters),
            storage_encrypted=True,
            backup=rds.BackupProps(retention=Duration.days(size.backup_days)),
            copy_tags_to_snapshot=True,
            deletion_protection=deployment.protected,
            removal_policy=removal,
        )

    def _proxy(
        self, target: rds.ProxyTarget, size: Size, network: Network, login_arn: str
    ) -> rds.DatabaseProxy:
        """The proxy logs in with tokens, too, so its role has the right that a process has; CDK gives rights to secrets only."""
        role = iam.Role(self, "ProxyRole", assumed_by=iam.ServicePrincipal("rds.amazonaws.com"))
        role.add_to_policy(iam.PolicyStatement(actions=["rds-db:connect"], resources=[login_arn]))
        return rds.DatabaseProxy(
            self,
            "Proxy",
            proxy_target=target,
            role=role,
            vpc=network.vpc,
            vpc_subnets=isolated(network.vpc),
            security_groups=[network.proxy],
            default_auth_scheme=rds.DefaultAuthScheme.IAM_AUTH,
            require_tls=True,
            max_connections_percent=size.proxy_percent,
            max_idle_connections_percent=min(10, size.proxy_percent),
            borrow_timeout=Duration.seconds(5),
            idle_client_timeout=Duration.minutes(10),
        )
