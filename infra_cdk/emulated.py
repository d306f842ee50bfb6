"""One template for AWS and for an emulator: a parameter conditions out what the emulator lacks or only pretends."""

from typing import Any

from aws_cdk import CfnCondition, CfnParameter, CfnResource, Fn, Stack, Token
from constructs import IConstruct

ABSENT = frozenset(
    {
        # MiniStack refuses a template with one of these.
        "AWS::ApiGatewayV2::VpcLink",
        "AWS::ApplicationAutoScaling::ScalableTarget",
        "AWS::ApplicationAutoScaling::ScalingPolicy",
        "AWS::EC2::EIP",
        "AWS::EC2::FlowLog",
        "AWS::EC2::NatGateway",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::RDS::DBProxy",
        "AWS::RDS::DBProxyTargetGroup",
        "AWS::WAFv2::WebACLAssociation",
        # It takes these, and there is no such machine, or it would start a container of its own: parameters name servers.
        "AWS::AutoScaling::AutoScalingGroup",
        "AWS::AutoScaling::LifecycleHook",
        "AWS::AutoScaling::ScalingPolicy",
        "AWS::AutoScaling::WarmPool",
        "AWS::EC2::LaunchTemplate",
        "AWS::ElastiCache::ParameterGroup",
        "AWS::ElastiCache::ReplicationGroup",
        "AWS::ElastiCache::SubnetGroup",
        "AWS::RDS::DBCluster",
        "AWS::RDS::DBClusterParameterGroup",
        "AWS::RDS::DBInstance",
        "AWS::RDS::DBParameterGroup",
        "AWS::RDS::DBSubnetGroup",
        "AWS::WAFv2::WebACL",
    }
)
"""Types that are not created on the emulator. A test compares the first part with the emulator's own list."""

PARAMETER = "Emulated"


class Emulator:
    """The parameters of a stack that make it fit an emulator. All are empty or "false" on AWS."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        emulated = CfnParameter(
            stack,
            PARAMETER,
            allowed_values=["true", "false"],
            default="false",
            description="true for an emulator of AWS: what it lacks is left out.",
        )
        self.yes = CfnCondition(stack, "IsEmulated", expression=Fn.condition_equals(emulated, "true"))
        self.no = CfnCondition(stack, "IsAws", expression=Fn.condition_equals(emulated, "false"))

    def parameter(self, name: str, description: str) -> str:
        """A value that the emulator's user gives, such as the address of a server."""
        return CfnParameter(
            self._stack, name, default="", description=f"For an emulator only: {description}"
        ).value_as_string

    def choose(self, emulated: Any, real: Any) -> str:
        """One of two values, as text."""
        return Token.as_string(Fn.condition_if(self.yes.logical_id, emulated, real))

    def export(self, name: str, emulated: Any, real: Any) -> str:
        """One of two values for another stack: an export of a resource that may be absent would not deploy."""
        value = self.choose(emulated, real)
        return Token.as_string(self._stack.export_value(value, name=f"{self._stack.stack_name}-{name}"))


def condition_out(stack: Stack, emulator: Emulator) -> None:
    """Put the condition on every resource of `ABSENT`, and on routes through what is absent."""
    resources = {id(c): c for c in stack.node.find_all() if CfnResource.is_cfn_resource(c)}
    for construct in resources.values():
        if _absent(construct):
            construct.cfn_options.condition = emulator.no  # type: ignore[attr-defined]


def _absent(construct: IConstruct) -> bool:
    kind = construct.cfn_resource_type  # type: ignore[attr-defined]
    return kind in ABSENT or (
        kind == "AWS::EC2::Route" and getattr(construct, "nat_gateway_id", None) is not None
    )
