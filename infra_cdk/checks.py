"""cdk-nag's rules for AWS solutions, and why some do not hold here. `tests/infra` and ``make synth`` run them."""

from typing import Final

from aws_cdk import Acknowledgment, App, Stack, Validations
from cdk_nag import AwsSolutionsChecks

ACKNOWLEDGED: Final[dict[str, str]] = {
    "AwsSolutions-AEC4": "Only the size dev has one node; what Redis holds can be rebuilt.",
    "AwsSolutions-APIG2": "The application validates each request, and answers as the LangGraph SDK expects.",
    "AwsSolutions-APIG3": "The firewall is an option (context waf): it costs more than a small API.",
    "AwsSolutions-APIG4": "The application checks the caller's key, in the Lambda and in the gateway alike, against "
    "PostgreSQL, where a revoked key ends within five seconds; an authorizer's cache would keep it for minutes.",
    "AwsSolutions-COG4": "Callers are programs with keys, not users of a pool; see APIG4.",
    "AwsSolutions-APIG6": "Access logs are on. Execution logs may hold bodies, which are tenants' data.",
    "AwsSolutions-AS3": "Hosts come and go with the load; the dashboard shows them, and alarms say when runs wait.",
    "AwsSolutions-ECS2": "The variables are addresses and figures. Secrets are read from Secrets Manager.",
    "AwsSolutions-ELB2": "The load balancer is private, and all that reaches it is in API Gateway's access log.",
    "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/AmazonAPIGatewayPushToCloudWatchLogs]": "One "
    "role for all APIs of the account, whose log groups nobody can name before.",
    "AwsSolutions-L1": "The pinned packages are tested on this runtime; a newer one is a change of requirements.",
    "AwsSolutions-RDS10": "Only the size dev, whose data is not kept, can be deleted (context protect).",
    "AwsSolutions-RDS3": "Only the size dev has no standby.",
    "AwsSolutions-RDS11": "The database is in subnets without a route, and its security group names who may connect.",
    "AwsSolutions-RDS6": "All but the migration log in with IAM.",
    "AwsSolutions-S1": "Snapshots are reached by the hosts alone, whose calls CloudTrail can record.",
    "AwsSolutions-SMG4": "The keys of Redis and of sandbox tokens are read at the start of each process; docs/deploy.md "
    "says how to rotate them. The database's administrator is rotated by RDS, all others have tokens.",
    "AwsSolutions-EC26": "The launch template encrypts its volume.",
    "AwsSolutions-EC28": "Detailed monitoring is on in the launch template.",
}
"""Rule → why it is not followed, for all stacks."""

_WILDCARDS: Final = (
    "*",
    "arn:<AWS::Partition>:ecs:<AWS::Region>:<AWS::AccountId>:task/<ClusterEB0386A7>/*",
    "arn:<AWS::Partition>:autoscaling:<AWS::Region>:<AWS::AccountId>:autoScalingGroup:*:autoScalingGroupName/<AWS::StackName>-*",
    "{name}-data:ExportsOutputFnGetAttSnapshotsBucket4B2233F7ArnC2933F21/*",
)
"""Resources as cdk-nag names them. `wildcards.REASONS` says for each action why, and a test knows no others."""

_OF_THE_TEMPLATE: Final = {
    "CloudFormation-Validate::W1001": "What is absent on an emulator is named in a branch of Fn::If that it does not take.",
    "CloudFormation-Validate::E3005": "The stage waits for the account's role for logs, which is there wherever there are roles.",
    "CloudFormation-Validate::W2502": "See E3005.",
    "CloudFormation-Validate::W8001": "Both conditions are there for whoever reads the template.",
}


def acknowledge(stack: Stack, name: str) -> None:
    """Say why rules are not followed. ``name`` is the deployment's."""
    wildcards = {
        f"AwsSolutions-IAM5[Resource::{resource.replace('{name}', name)}]": "See infra_cdk/wildcards.py."
        for resource in _WILDCARDS
    }
    for rule, reason in {**ACKNOWLEDGED, **wildcards, **_OF_THE_TEMPLATE}.items():
        Validations.of(stack).acknowledge(Acknowledgment(id=rule, reason=reason))


def add_checks(app: App) -> None:
    """Let ``synth`` fail when a rule is broken that is not in `ACKNOWLEDGED`."""
    Validations.of(app).add_plugins(AwsSolutionsChecks(app))
