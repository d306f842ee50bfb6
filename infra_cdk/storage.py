"""The bucket that keeps snapshots of workspaces."""

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from constructs import Construct

from sandfleet.infra_cdk.deployment import Deployment

KEEP_DAYS = 30
"""Backstop: the hosts remove snapshots themselves, after ``SANDFLEET_SNAPSHOT_KEEP_S`` (7 days)."""


class Snapshots(Construct):
    """The bucket: private, encrypted, TLS only."""

    def __init__(self, scope: Construct, id: str, deployment: Deployment) -> None:
        super().__init__(scope, id)
        self.bucket = s3.Bucket(
            self,
            "Bucket",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            removal_policy=RemovalPolicy.RETAIN if deployment.kept else RemovalPolicy.DESTROY,
            lifecycle_rules=[
                s3.LifecycleRule(
                    expiration=Duration.days(KEEP_DAYS),
                    abort_incomplete_multipart_upload_after=Duration.days(1),
                )
            ],
        )

    def grant(self, grantee: iam.IGrantable) -> None:
        """Let a sandbox host put, get and remove snapshots."""
        grantee.grant_principal.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["s3:PutObject", "s3:GetObject", "s3:DeleteObject"],
                resources=[self.bucket.arn_for_objects("*")],
            )
        )
