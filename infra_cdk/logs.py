"""Log groups: each has a retention."""

from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from constructs import Construct

from sandfleet.infra_cdk.sizes import Size

_RETENTION = {
    7: logs.RetentionDays.ONE_WEEK,
    30: logs.RetentionDays.ONE_MONTH,
    90: logs.RetentionDays.THREE_MONTHS,
}


def log_group(scope: Construct, id: str, size: Size, name: str | None = None) -> logs.LogGroup:
    """A log group that forgets after the size's days and goes with its stack: it holds ids, no content. ``name`` is for one that
    AWS writes to by itself, and would make without a retention."""
    return logs.LogGroup(
        scope,
        id,
        log_group_name=name,
        retention=_RETENTION[size.log_days],
        removal_policy=RemovalPolicy.DESTROY,
    )
