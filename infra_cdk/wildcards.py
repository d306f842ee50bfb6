"""Every action that a role may use on more than one named resource, and why. A test knows no others."""

from typing import Final

REASONS: Final[dict[str, str]] = {
    "xray:PutTraceSegments": "X-Ray knows no resources.",
    "xray:PutTelemetryRecords": "X-Ray knows no resources.",
    "ec2:CreateNetworkInterface": "Lambda makes a function's network interfaces itself, with names of its own.",
    "ec2:DescribeNetworkInterfaces": "Descriptions know no resources.",
    "ec2:DeleteNetworkInterface": "See ec2:CreateNetworkInterface.",
    "ec2:AssignPrivateIpAddresses": "See ec2:CreateNetworkInterface.",
    "ec2:UnassignPrivateIpAddresses": "See ec2:CreateNetworkInterface.",
    "ecr:GetAuthorizationToken": "A login to the registry as a whole; what may be pulled is named beside it.",
    "ecs:UpdateTaskProtection": "Tasks of this cluster: an executor protects its own, whose id nobody knows before.",
    "ecs:GetTaskProtection": "See ecs:UpdateTaskProtection.",
    "autoscaling:DescribeAutoScalingGroups": "Descriptions know no resources.",
    "autoscaling:DescribeAutoScalingInstances": "Descriptions know no resources.",
    "autoscaling:CompleteLifecycleAction": "Groups of this stack: the name of its own would make a circle of resources.",
    "autoscaling:SetDesiredCapacity": "One group; the wildcard stands for the number in its ARN.",
    "autoscaling:SetInstanceProtection": "One group; the wildcard stands for the number in its ARN.",
    "s3:GetObject": "Snapshots in the one bucket.",
    "s3:PutObject": "Snapshots in the one bucket.",
    "s3:DeleteObject": "Snapshots in the one bucket.",
    "sqs:*": "A denial: of what comes without TLS.",
    "s3:*": "A denial: of what comes without TLS.",
}
"""Action → reason."""
