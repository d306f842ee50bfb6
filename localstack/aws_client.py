"""Clients of the AWS emulator."""

from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session


def aws_client(
    service: str, endpoint_url: str, region: str, env: dict[str, str]
) -> AbstractAsyncContextManager[Any]:
    """A client of one service; ``env`` supplies the credentials, which an emulator does not check."""
    client = get_session().create_client(
        service,
        region_name=region,
        endpoint_url=endpoint_url,
        aws_access_key_id=env.get("AWS_ACCESS_KEY_ID", "test"),
        aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY", "test"),
        config=AioConfig(
            s3={"addressing_style": "path"}
        ),  # an emulator has no host of its own for each bucket
    )
    return cast("AbstractAsyncContextManager[Any]", client)
