"""Every action that a role may use on more than one named resource, and why. A test knows no others."""

from typing import Final

REASONS: Final[dict[str, str]] = {
    "xray:PutTraceSegments": "X-Ray knows no resources.",
    "logs:DescribeLogGroups": "The collector's one group; the wildcard stands for its streams.",
    "logs:DescribeLogStreams": "See logs:DescribeLogGroups.",
    "xray:PutTelemetryRecords": "X-Ray knows no resources.",
    "ec2:CreateNetworkInterface": "Lambda makes a function's network interfaces itself, with names of its own.",
    "ec2:DescribeNetworkInterfaces": "Descriptions know no resources.",
    "ec2:DeleteNetworkInterface": "See ec2:CreateNetworkInterface.",
    "ec2:AssignPrivateIpAddresses": "See ec2:CreateNetworkInterface.",
    "ec2:UnassignPrivateIpAddresses": "See ec2:CreateNetworkInterface.",
    "ecr:GetAuthorizationToken": "A login to the registry as a whole; what may be pulled is named beside it.",
    "ecs:UpdateTaskProtection": "Tasks of this cluster: an executor protects its own, whose id nobody knows before.",
    "ecs:ListTasks": "Tasks of this cluster, by a condition: the resource would be a container instance.",
    "ecs:GetTaskProtection": "See ecs:UpdateTaskProtection.",
    "autoscaling:DescribeAutoScalingGroups": "Descriptions know no resources.",
    "autoscaling:DescribeAutoScalingInstances": "Descriptions know no resources.",
    "autoscaling:CompleteLifecycleAction": "Groups of this stack: the name of its own would make a circle of resources.",
    "autoscaling:SetInstanceHealth": "See autoscaling:CompleteLifecycleAction.",
    "ssm:UpdateInstanceInformation": "Session Manager knows no resources before a machine has an id.",
    "ssmmessages:CreateControlChannel": "See ssm:UpdateInstanceInformation.",
    "ssmmessages:CreateDataChannel": "See ssm:UpdateInstanceInformation.",
    "ssmmessages:OpenControlChannel": "See ssm:UpdateInstanceInformation.",
    "ssmmessages:OpenDataChannel": "See ssm:UpdateInstanceInformation.",
    "ec2:DescribeSubnets": "Descriptions know no resources.",
    "autoscaling:SetDesiredCapacity": "One group; the wildcard stands for the number in its ARN.",
    "autoscaling:SetInstanceProtection": "One group; the wildcard stands for the number in its ARN.",
    "s3:GetObject": "Snapshots in the one bucket.",
    "s3:PutObject": "Snapshots in the one bucket.",
    "s3:DeleteObject": "Snapshots in the one bucket.",
    "sqs:*": "A denial: of what comes without TLS.",
    "s3:*": "A denial: of what comes without TLS.",
}
"""Action → reason."""
