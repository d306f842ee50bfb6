"""Requests and event streams of the API."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from sandfleet.fleet.sandbox_client.errors import refusal

Params = Mapping[str, str | int]


class Wire:
    """A connection to the API. Methods raise ApiError, and httpx.HTTPError when the API does not answer."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"x-api-key": api_key},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterable[bytes] | None = None,
        patient: bool = False,
    ) -> Any:
        """The JSON answer to a request, None if there is none. ``patient``: it may come as late as it will."""
        response = await self._http.request(
            method,
            path,
            params=params,
            headers=headers,
            json=body,
            content=content,
            timeout=httpx.Timeout(None, connect=10.0) if patient else httpx.USE_CLIENT_DEFAULT,
        )
        if response.status_code >= 400:
            raise refusal(response)
        return response.json() if response.content else None

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[httpx.Response]:
        """A response whose body is still to be read."""
        async with self._http.stream(
            method,
            path,
            params=params,
            headers=headers,
            json=body,
            timeout=httpx.Timeout(60.0, connect=10.0),  # silence is broken by heartbeats
        ) as response:
            if response.status_code >= 400:
                await response.aread()
                raise refusal(response)
            yield response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()


async def events(response: httpx.Response) -> AsyncGenerator[tuple[str, dict[str, Any], str | None]]:
    """Server-sent events as they come: name, data, id."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id")
            fields = {}
