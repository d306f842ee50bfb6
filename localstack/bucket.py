"""The S3 bucket for snapshots of workspaces."""

from sandfleet.localstack.aws_client import aws_client


async def create_bucket(endpoint_url: str, region: str, env: dict[str, str], name: str) -> str:
    """Create the bucket unless it is there, and return its name."""
    async with aws_client("s3", endpoint_url, region, env) as s3:
        try:
            await s3.create_bucket(Bucket=name)
        except s3.exceptions.BucketAlreadyOwnedByYou:
            pass
    return name
