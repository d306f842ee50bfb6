"""The S3 bucket for snapshots of workspaces."""

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session


def s3_client(endpoint_url: str, region: str, env: dict[str, str]) -> AbstractAsyncContextManager[Any]:
    """A client of the emulator; ``env`` supplies the credentials, which an emulator does not check."""
    client = get_session().create_client(
        "s3",
        region_name=region,
        endpoint_url=endpoint_url,
        aws_access_key_id=env.get("AWS_ACCESS_KEY_ID", "test"),
        aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY", "test"),
        config=AioConfig(s3={"addressing_style": "path"}),
    )
    return cast("AbstractAsyncContextManager[Any]", client)


async def create_bucket(endpoint_url: str, region: str, env: dict[str, str], name: str) -> str:
    """Create the bucket unless it is there, and return its name."""
    async with s3_client(endpoint_url, region, env) as s3:
        try:
            await s3.create_bucket(Bucket=name)
        except s3.exceptions.BucketAlreadyOwnedByYou:
            pass
    return name
