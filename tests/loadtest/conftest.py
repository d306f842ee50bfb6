"""A provider of its own for each test, on a free port."""

from collections.abc import AsyncIterator

import httpx
import pytest

from sandfleet.loadtest.provider.server import Provider
from tests.loadtest.served import Served


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    provider = Provider()
    server = await provider.serve("127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        yield Served(provider, url, http)
    server.close()
    for connection in list(provider.connections):
        connection.close()
