"""Images: built from a gathered context and pushed by ``cdk deploy``, or such as exist already."""

from aws_cdk import aws_ecr_assets as assets
from aws_cdk import aws_ecs as ecs
from constructs import Construct

from sandfleet.infra_cdk.deployment import Deployment
from sandfleet.infra_cdk.packaging import image_context


class Image:
    """The image of a part: ``uri``, and ``container`` for a task definition."""

    def __init__(self, scope: Construct, part: str, deployment: Deployment) -> None:
        self.asset: assets.DockerImageAsset | None = None
        given = deployment.images.get(part)  # type: ignore[call-overload]
        if given:
            self.uri = given
            self.container = ecs.ContainerImage.from_registry(given)
            return
        platform = {"arm64": assets.Platform.LINUX_ARM64, "x86_64": assets.Platform.LINUX_AMD64}
        self.asset = assets.DockerImageAsset(
            scope,
            f"{part.capitalize()}Image",
            directory=str(image_context(part, deployment)),
            platform=platform[deployment.architecture],
            build_args={"BASE": f"python:{deployment.python}-slim"},
        )
        self.uri = self.asset.image_uri
        self.container = ecs.ContainerImage.from_docker_image_asset(self.asset)
