"""A world of runs for stream tests, on real PostgreSQL and Redis. No test may leave a key without a time to live."""

from collections.abc import AsyncIterator

import pytest

from tests.streams.world import World, open_world


@pytest.fixture
async def world(database: str, redis_url: str) -> AsyncIterator[World]:
    async with open_world(database, redis_url) as opened:
        yield opened
        async for key in opened.redis.scan_iter("*"):
            assert await opened.redis.ttl(key) > 0, f"{key!r} lives for ever"
        await opened.redis.flushdb()
