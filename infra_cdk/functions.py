"""The Lambdas: one package of code, a role, a log group and a reserved concurrency each."""

from dataclasses import dataclass

from aws_cdk import Duration
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_lambda_event_sources as sources
from constructs import Construct

from sandfleet.infra_cdk.connections import FUNCTION_CONCURRENCY
from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.emulated import Emulator
from sandfleet.infra_cdk.logs import log_group
from sandfleet.infra_cdk.network import Network, private
from sandfleet.infra_cdk.queues import Queues
from sandfleet.infra_cdk.sizes import Size

_NETWORK_ACTIONS = (
    "ec2:CreateNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DeleteNetworkInterface",
    "ec2:AssignPrivateIpAddresses",
    "ec2:UnassignPrivateIpAddresses",
)


@dataclass(frozen=True)
class FunctionSetting:
    """What all functions of a deployment share."""

    deployment: Deployment
    size: Size
    network: Network
    code: lambda_.Code
    environment: dict[str, str]
    emulator: Emulator


def python_function(
    scope: Construct,
    id: str,
    shared: FunctionSetting,
    module: str,
    *,
    timeout: Duration,
    memory_mib: int,
    concurrency: int,
    environment: dict[str, str] | None = None,
) -> lambda_.Function:
    """A function whose handler is ``sandfleet.functions.MODULE.handler``. Its log group has a retention, and its role may
    write to that group, to X-Ray, and have an address in the network."""
    role = iam.Role(scope, f"{id}Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
    logs = log_group(scope, f"{id}Logs", shared.size)
    logs.grant_write(role)
    # A role of our own gets nothing by itself: Lambda makes network interfaces in its name.
    role.add_to_policy(iam.PolicyStatement(actions=list(_NETWORK_ACTIONS), resources=["*"]))
    return lambda_.Function(
        scope,
        id,
        runtime=lambda_.Runtime(f"python{shared.deployment.python}", lambda_.RuntimeFamily.PYTHON),
        architecture=lambda_.Architecture.ARM_64
        if shared.deployment.architecture == "arm64"
        else lambda_.Architecture.X86_64,
        code=shared.code,
        handler=f"sandfleet.functions.{module}.handler",
        role=role,
        log_group=logs,
        timeout=timeout,
        memory_size=memory_mib,
        reserved_concurrent_executions=concurrency,
        environment={
            **shared.environment,
            "POWERTOOLS_METRICS_NAMESPACE": "sandfleet",
            **(environment or {}),
        },
        tracing=lambda_.Tracing.ACTIVE,
        vpc=shared.network.vpc,
        vpc_subnets=private(shared.network.vpc),
        security_groups=[shared.network.functions],
    )


class Scheduled(Construct):
    """The sweeper and the scaler, once a minute, and the consumer of dead permits."""

    def __init__(
        self, scope: Construct, id: str, shared: FunctionSetting, queues: Queues, scaler_targets: str
    ) -> None:
        super().__init__(scope, id)
        # A sweep goes on for a lease and some; a call that is not over in a minute must not meet the next one.
        self.sweeper = python_function(
            self,
            "Sweeper",
            shared,
            "sweeper.handler",
            timeout=Duration.seconds(55),
            memory_mib=512,
            concurrency=FUNCTION_CONCURRENCY["Sweeper"],
        )
        self.scaler = python_function(
            self,
            "Scaler",
            shared,
            "scaler.handler",
            timeout=Duration.seconds(58),
            memory_mib=512,
            concurrency=FUNCTION_CONCURRENCY["Scaler"],
            environment={
                "SANDFLEET_SCALER_TARGETS": scaler_targets,
                # On an emulator an alarm calls it, which is quicker to see there.
                "SANDFLEET_SCALER_SETS_COUNTS": shared.emulator.choose(
                    "false", str(shared.deployment.scales_fast).lower()
                ),
            },
        )
        self.dead_letters = python_function(
            self,
            "DeadLetters",
            shared,
            "dead_letters.handler",
            timeout=Duration.seconds(30),
            memory_mib=512,
            concurrency=FUNCTION_CONCURRENCY["DeadLetters"],
        )
        for function in (self.sweeper, self.scaler):
            events.Rule(
                self,
                f"Every{function.node.id}",
                schedule=events.Schedule.rate(Duration.minutes(1)),
                # No second try: the next minute's call does the same.
                targets=[
                    targets.LambdaFunction(function, retry_attempts=0, max_event_age=Duration.minutes(1))
                ],
            )
        for queue in queues.dead.values():
            # Two calls at once is the least that SQS' poller takes.
            self.dead_letters.add_event_source(
                sources.SqsEventSource(queue, batch_size=10, max_concurrency=2)
            )
        self.all = (self.sweeper, self.scaler, self.dead_letters)
        queues.grant_look(self.scaler)
        for function in (self.sweeper, self.dead_letters):
            queues.grant_send(function)
