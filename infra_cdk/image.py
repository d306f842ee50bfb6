"""Images: built from a gathered context and pushed by ``cdk deploy``, or such as exist already."""

import re
from typing import Any, Final, Literal

from aws_cdk import Aws
from aws_cdk import aws_ecr_assets as assets
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from sandfleet.infra_cdk.deployment import ROOT, Deployment
from sandfleet.infra_cdk.packaging import image_context

Part = Literal["executor", "gateway", "host", "sandbox", "collector"]
_DOCKERFILES: Final = ROOT / "infra_cdk" / "images"
_PRIVATE: Final = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.[^/]+/(?P<name>[^:@]+)")


def grant_pull(role: iam.IRole, deployment: Deployment, *parts: Part) -> None:
    """Let a role pull those images of ``parts`` that exist already in a private ECR. CDK does it for those that it pushes, and
    all others must be public."""
    images = (deployment.images.get(part, "") for part in parts)
    repositories = [
        f"arn:{Aws.PARTITION}:ecr:{found['region']}:{found['account']}:repository/{found['name']}"
        for found in map(_PRIVATE.match, images)
        if found
    ]
    if not repositories:
        return
    pull = ["ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage"]
    for actions, resources in ((pull, repositories), (["ecr:GetAuthorizationToken"], ["*"])):
        role.add_to_principal_policy(iam.PolicyStatement(actions=actions, resources=resources))


def _context(part: Part, deployment: Deployment) -> dict[str, Any]:
    if part == "sandbox":  # nothing of ours is in it
        name = "sandbox.Dockerfile"
        return {"directory": str(_DOCKERFILES), "file": name, "exclude": ["*", f"!{name}"]}
    return {"directory": str(image_context(part, deployment))}


class Image:
    """The image of a part: ``uri``, and ``container`` for a task definition."""

    def __init__(self, scope: Construct, part: Part, deployment: Deployment) -> None:
        self.asset: assets.DockerImageAsset | None = None
        given = deployment.images.get(part)
        if given:
            self.uri = given
            self.container = ecs.ContainerImage.from_registry(given)
            return
        platform = {"arm64": assets.Platform.LINUX_ARM64, "x86_64": assets.Platform.LINUX_AMD64}
        self.asset = assets.DockerImageAsset(
            scope,
            f"{part.capitalize()}Image",
            **_context(part, deployment),
            platform=platform[deployment.architecture],
            build_args={"BASE": f"python:{deployment.python}-slim"},
        )
        self.uri = self.asset.image_uri
        self.container = ecs.ContainerImage.from_docker_image_asset(self.asset)
