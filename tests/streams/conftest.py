"""A world of runs for stream tests, on real PostgreSQL and Redis."""

from collections.abc import AsyncIterator

import pytest

from tests.streams.world import World, open_world


@pytest.fixture
async def world(database: str, redis_url: str) -> AsyncIterator[World]:
    async with open_world(database, redis_url) as opened:
        yield opened
