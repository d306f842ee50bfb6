"""An HTTP client that gets its answer in the end: it asks one API after the other, with the same Idempotency-Key."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx

_PAUSE_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_TIMEOUT = httpx.Timeout(20.0, connect=2.0)  # a stopped API keeps its connections; others answer meanwhile


class Answer(NamedTuple):
    """A status below 500 with its headers and JSON body."""

    status: int
    headers: httpx.Headers
    json: Any


class Api:
    """The APIs of a stack as one that never fails. ``retries`` counts requests that had to be sent again."""

    def __init__(self, urls: list[str], key: str, seed: int) -> None:
        self.retries = 0
        self._clients = [
            httpx.AsyncClient(
                base_url=url, headers={"x-api-key": key}, timeout=_TIMEOUT, trust_env=False, limits=_LIMITS
            )
            for url in urls
        ]
        self._source = random.Random(f"api {seed}")

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()

    def clients(self) -> "itertools.cycle[httpx.AsyncClient]":
        """All of them, again and again, beginning anywhere."""
        first = self._source.randrange(len(self._clients))
        return itertools.cycle(self._clients[first:] + self._clients[:first])

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Answer:
        """Send a request until it is answered by something else than 429 or 5xx."""
        headers = {"idempotency-key": key} if key else {}
        for client, pause_s in zip(self.clients(), _pauses(), strict=False):
            try:
                response = await client.request(method, path, json=body, headers=headers)
                if response.status_code < 500 and response.status_code != 429:
                    return Answer(
                        response.status_code,
                        response.headers,
                        response.json() if response.content.strip() else None,
                    )
            except httpx.TransportError:
                pass
            self.retries += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def wait(self, path: str, body: Any, key: str) -> Answer:
        """Submit a run and wait for its outcome; when the answer breaks off, wait for it where ``Location`` says."""
        headers, location = {"idempotency-key": key}, None
        for client, pause_s in zip(self.clients(), _pauses(), strict=False):
            try:
                method, where = ("POST", path) if location is None else ("GET", location)
                async with client.stream(
                    method, where, json=body if location is None else None, headers=headers
                ) as response:
                    if response.status_code < 400:
                        location = response.headers["location"]
                    content = await response.aread()
                    if response.status_code < 500 and response.status_code != 429:
                        return Answer(response.status_code, response.headers, response.json())
                    assert content
            except httpx.TransportError:
                pass
            self.retries += 1
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def stream(
        self, client: httpx.AsyncClient, path: str, last_event_id: str
    ) -> AsyncIterator[httpx.Response]:
        """One try at a stream of events. Raises httpx.TransportError."""
        async with client.stream("GET", path, headers={"last-event-id": last_event_id}) as response:
            yield response


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


def _pauses() -> "itertools.chain[float]":
    return itertools.chain(_PAUSE_S, itertools.repeat(_PAUSE_S[-1]))
