"""What task definitions share."""

from aws_cdk import aws_ecs as ecs

from sandfleet.infra_cdk.deployment import Deployment


def cpu_architecture(deployment: Deployment) -> ecs.RuntimePlatform:
    """Linux on the deployment's processors."""
    return ecs.RuntimePlatform(
        operating_system_family=ecs.OperatingSystemFamily.LINUX,
        cpu_architecture=ecs.CpuArchitecture.ARM64
        if deployment.architecture == "arm64"
        else ecs.CpuArchitecture.X86_64,
    )
