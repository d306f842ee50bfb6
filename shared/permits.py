"""Permits: SQS messages that say "a run of this pool is ready". Which run, PostgreSQL decides at the claim.

A permit that is received stays invisible while a run is executed, extended in batches; it is the outer lease.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from sandfleet.shared import tracing
from sandfleet.shared.settings import Settings

_BATCH = 10  # entries in one SQS batch call at most
_ATTRIBUTE = "traceparent"
_WITH_TRACE = {"MessageAttributeNames": [_ATTRIBUTE], "AttributeNames": ["SentTimestamp"]}
_LIMIT_S = 1.0
"""How long a call may take in all. What is not done by then is not needed: see each method."""
_PATIENCE_S = 5.0  # beyond a long poll's own time, and for opening the client

T = TypeVar("T")


class Permits:
    """The queues of all pools. Opened lazily, so that a Lambda pays for it at its first submit only."""

    def __init__(self, settings: Settings) -> None:
        self._urls = settings.queue_urls
        self._endpoint = settings.aws_endpoint_url
        self._region = settings.aws_region
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: Any = None

    async def client(self) -> Any:
        """The SQS client, opened at its first use, which is no part of a call's time: loading it takes a cold and busy
        Lambda a second alone. Raises TimeoutError when there are no credentials soon."""
        async with asyncio.timeout(_PATIENCE_S), self._opening:
            if self._client is None:
                # Imported here: it costs a Lambda's cold start a third of a second, and only submits need it.
                from aiobotocore.config import AioConfig
                from aiobotocore.session import get_session

                emulated = (
                    {"aws_access_key_id": "test", "aws_secret_access_key": "test"} if self._endpoint else {}
                )
                self._client = await self._stack.enter_async_context(
                    get_session().create_client(
                        "sqs",
                        region_name=self._region,
                        endpoint_url=self._endpoint,
                        config=AioConfig(
                            connect_timeout=1,
                            read_timeout=25,
                            retries={"max_attempts": 1},
                            max_pool_connections=8,
                        ),
                        **emulated,
                    )
                )
        return self._client

    async def aclose(self) -> None:
        """Close the connections."""
        await self._stack.aclose()
        self._client = None

    async def send(self, pool: str, count: int, traceparents: Sequence[str] = ()) -> None:
        """Send ``count`` permits, within a second in all. Raises the client's error or TimeoutError; what was not sent
        is not needed: executors find ready runs on their own, only later. ``traceparents`` are of runs that the permits were
        sent for; each permit carries one while there are any, and whoever receives it may take another run."""
        url = self._urls.get(pool)
        if url is None:
            return
        client = await self.client()
        async with asyncio.timeout(_LIMIT_S):
            for chunk in _chunks(range(count)):
                await client.send_message_batch(
                    QueueUrl=url,
                    Entries=[
                        {"Id": str(i), "MessageBody": pool, **_traced(traceparents[i : i + 1])} for i in chunk
                    ],
                )

    async def receive(self, pool: str, limit: int, wait_s: int, visibility_s: int) -> list[str]:
        """Long-poll for up to ``limit`` permits (ten at most); returns their receipt handles. Raises TimeoutError when the
        queue has not answered soon after ``wait_s``: whoever polls also looks for ready runs then."""
        async with asyncio.timeout(wait_s + _PATIENCE_S):
            client = await self.client()
            answer = await client.receive_message(
                QueueUrl=self._urls[pool],
                MaxNumberOfMessages=min(limit, _BATCH),
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=visibility_s,
                **(_WITH_TRACE if tracing.on() else {}),
            )
        messages = answer.get("Messages", [])
        if tracing.on():
            for message in messages:
                _trace(message)
        return [message["ReceiptHandle"] for message in messages]

    async def delete(self, pool: str, handles: Sequence[str]) -> None:
        """Delete permits, within a second in all: one that is left comes back, and is found to be surplus. An expired handle
        is refused by some servers and accepted by others: both are fine."""
        client = await self.client()
        async with asyncio.timeout(_LIMIT_S):
            for chunk in _chunks(handles):
                await client.delete_message_batch(
                    QueueUrl=self._urls[pool],
                    Entries=[{"Id": str(i), "ReceiptHandle": h} for i, h in enumerate(chunk)],
                )

    async def extend(self, pool: str, handles: Sequence[str], visibility_s: int) -> None:
        """Keep permits invisible for ``visibility_s`` from now."""
        client = await self.client()
        for chunk in _chunks(handles):
            await client.change_message_visibility_batch(
                QueueUrl=self._urls[pool],
                Entries=[
                    {"Id": str(i), "ReceiptHandle": h, "VisibilityTimeout": visibility_s}
                    for i, h in enumerate(chunk)
                ],
            )

    async def visible(self, pool: str) -> int:
        """Permits that an executor could receive now. SQS counts approximately, and some seconds late."""
        client = await self.client()
        answer = await client.get_queue_attributes(
            QueueUrl=self._urls[pool], AttributeNames=["ApproximateNumberOfMessages"]
        )
        return int(answer["Attributes"]["ApproximateNumberOfMessages"])

    def url(self, pool: str) -> str:
        """The queue of a pool that has one."""
        return self._urls[pool]

    def pools(self) -> list[str]:
        """The pools that have a queue."""
        return list(self._urls)

    def has_queue(self, pool: str) -> bool:
        """Whether a queue is configured for the pool."""
        return pool in self._urls


def _traced(traceparents: Sequence[str]) -> dict[str, Any]:
    """What a message carries of the trace that it belongs to, if there is one."""
    if not traceparents:
        return {}
    return {"MessageAttributes": {_ATTRIBUTE: {"DataType": "String", "StringValue": traceparents[0]}}}


def _trace(message: dict[str, Any]) -> None:
    """Make the span of a permit that was received: from when the queue got it."""
    given = message.get("MessageAttributes", {}).get(_ATTRIBUTE, {}).get("StringValue")
    sent_ms = message.get("Attributes", {}).get("SentTimestamp")
    if (parent := tracing.parse(given)) is not None and sent_ms is not None:
        since = time.monotonic() - max(0.0, time.time() - int(sent_ms) / 1000)
        tracing.begin("permit", parent=parent, kind="consumer", since=since).end()


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
