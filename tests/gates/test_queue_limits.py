"""How long calls of SQS may take: nobody waits for a queue that hangs."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandfleet.shared import permits as permits_module
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings


@pytest.fixture
async def permits(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Permits]:
    """Of an endpoint that takes connections and never answers, as a frozen server does."""
    connected: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    made = Permits(Settings(aws_endpoint_url=url, queue_urls={"default": f"{url}/queue"}))
    await made.client()
    monkeypatch.setattr(permits_module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(permits_module, "_LIMIT_S", 0.2)
    yield made
    await made.aclose()
    for writer in connected:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_poll_that_hangs_ends_soon_after_its_time(permits: Permits) -> None:
    """Executors look for ready runs when a poll has ended. Red without the limit: only the client's own, several times as
    long, would end it, and by an error of another kind."""
    with pytest.raises(TimeoutError):
        await permits.receive("default", 1, 0, 30)


async def test_permits_are_not_sent_or_deleted_for_long(permits: Permits) -> None:
    """Red when whoever submits, or ends a run, waits for a queue that hangs."""
    with pytest.raises(TimeoutError):
        await permits.send("default", 1)
    with pytest.raises(TimeoutError):
        await permits.delete("default", ["handle"])
