"""The S3 bucket that keeps the archives of workspaces."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from sandfleet.fleet.sandbox.errors import SnapshotDamaged, SnapshotFailed
from sandfleet.shared.settings import Settings

_PIECE_BYTES = 1024 * 1024
_AWAY = (BotoCoreError, aiohttp.ClientError, TimeoutError, OSError)


class Bucket:
    """Connected at first use. All methods raise SnapshotFailed when S3 does not do what is asked."""

    def __init__(self, settings: Settings) -> None:
        self._name = settings.snapshot_bucket
        self._endpoint = settings.aws_endpoint_url
        self._region = settings.aws_region
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: Any = None

    async def put(self, key: str, source: Path) -> None:
        """Store a file."""
        try:
            with source.open("rb") as file:
                await (await self._opened()).put_object(Bucket=self._name, Key=key, Body=file)
        except (ClientError, *_AWAY) as error:
            raise self._failed("stored", error) from error

    async def get(self, key: str, target: Path) -> None:
        """Fetch a file."""
        try:
            answer = await (await self._opened()).get_object(Bucket=self._name, Key=key)
            with target.open("wb") as file:
                async for piece in answer["Body"].iter_chunks(_PIECE_BYTES):
                    await asyncio.to_thread(file.write, piece)
        except ClientError as error:
            if error.response["Error"].get("Code") == "NoSuchKey":
                raise SnapshotDamaged(f"The bucket {self._name} has it no more.") from error
            raise self._failed("fetched", error) from error
        except _AWAY as error:
            raise self._failed("fetched", error) from error

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove up to 1,000 files; those that are gone are fine."""
        try:
            await (await self._opened()).delete_objects(
                Bucket=self._name, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        except (ClientError, *_AWAY) as error:
            raise self._failed("removed", error) from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._stack.aclose()
        self._client = None

    async def _opened(self) -> Any:
        async with self._opening:
            if self._client is None:
                emulated: dict[str, Any] = (
                    {"aws_access_key_id": "test", "aws_secret_access_key": "test"} if self._endpoint else {}
                )
                self._client = await self._stack.enter_async_context(
                    get_session().create_client(
                        "s3",
                        region_name=self._region,
                        endpoint_url=self._endpoint,
                        # Emulators have no names of hosts for buckets.
                        config=AioConfig(
                            connect_timeout=5,
                            read_timeout=60,
                            s3={"addressing_style": "path"} if self._endpoint else {},
                        ),
                        **emulated,
                    )
                )
        return self._client

    def _failed(self, done: str, error: Exception) -> SnapshotFailed:
        said = (
            error.response["Error"].get("Code", "")
            if isinstance(error, ClientError)
            else type(error).__name__
        )
        return SnapshotFailed(f"The snapshot could not be {done} in the bucket {self._name}: {said}")
