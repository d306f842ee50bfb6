"""HTTP to sandbox hosts, by their API in ``docs/sandbox-protocol.md``.

Imported at the first request that needs a sandbox: a Lambda's cold start does not pay for the client.
"""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from sandfleet.functions.api.host_ask import Ask
from sandfleet.functions.api.sandbox_errors import HostRefused
from sandfleet.shared import tracing
from sandfleet.shared.errors import HostAway, HostBroke
from sandfleet.shared.settings import Settings

_CONNECT_S = 5.0
_BROKE = "The sandbox's host went away meanwhile: what was asked may have been done."
_LOOK_AGAIN_S = 10.0  # for a host on this machine, whose name may have changed or which may have come
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEPALIVE.items()
        if hasattr(socket, name)
    ),
]
"""By which a machine that has vanished is noticed within about 30 s where nothing is sent: a silent command may go on for hours.
No TCP_USER_TIMEOUT: it would end a write, too, that a process does not take."""


class HostClient:
    """Connections to all hosts, and which of them is on this machine. One per process."""

    def __init__(self, settings: Settings) -> None:
        self._own_at = str(Path(settings.host_socket).absolute())
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._own: str | None = None
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()

    async def own(self) -> str | None:
        """The name of the host on this machine, if one answers at SANDFLEET_HOST_SOCKET."""
        async with self._asking:
            now = time.monotonic()
            if self._own is None or self._asked_at is None or now > self._asked_at + _LOOK_AGAIN_S:
                if self._own is None and self._asked_at is not None and now < self._asked_at + 1.0:
                    return None
                self._asked_at = now
                try:
                    answer = await self._client("unix").get("/health", timeout=_CONNECT_S)
                    self._own = str(answer.json()["host_id"])
                except (httpx.HTTPError, ValueError, KeyError):
                    self._own = None
            return self._own

    async def open(self, host_id: str, remote: str | None, token: str, ask: Ask) -> httpx.Response:
        """Send a request; its response, whose body is still to be read and which the caller closes.

        Raises HostAway (nothing was sent), HostBroke and HostRefused.
        """
        if host_id == await self.own():
            client = self._client("unix")
        elif remote is not None:
            client = self._client(remote)
        else:
            raise HostAway(
                f"The sandbox's host {host_id} does not answer here. If it is on another machine than the API, set "
                "SANDFLEET_HOST_LISTEN there."
            )
        span = tracing.current_traceparent()
        try:
            request = client.build_request(
                ask.method,
                ask.path,
                params=dict(ask.params),
                json=ask.json,
                content=ask.content,
                headers={"authorization": f"Bearer {token}", **({"traceparent": span} if span else {})},
                timeout=httpx.Timeout(ask.silence_s, connect=_CONNECT_S),
            )
            response = await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise HostAway("The sandbox's host does not answer. Try again.", retry_after_s=2) from error
        except httpx.TransportError as error:
            raise HostBroke(_BROKE, retry_after_s=2) from error
        if response.status_code >= 400:
            raise await _refusal(response)
        return response

    async def json(self, host_id: str, remote: str | None, token: str, ask: Ask) -> dict[str, Any]:
        """As `open`, with the whole answer, which is empty if it has no body."""
        return await self.whole(await self.open(host_id, remote, token, ask))

    @staticmethod
    async def whole(response: httpx.Response) -> dict[str, Any]:
        """The JSON body of a response, read and closed; empty if there is none."""
        try:
            body = await response.aread()
            answer: dict[str, Any] = response.json() if body else {}
            return answer
        except httpx.TransportError as error:
            raise HostBroke(_BROKE, retry_after_s=2) from error
        finally:
            await response.aclose()

    @staticmethod
    async def pieces(response: httpx.Response) -> AsyncGenerator[bytes]:
        """The body of a response as it comes, closed at the end. Raises HostBroke."""
        try:
            async for piece in response.aiter_raw():
                yield piece
        except httpx.TransportError as error:
            raise HostBroke(_BROKE, retry_after_s=2) from error
        finally:
            await response.aclose()

    def _client(self, at: str) -> httpx.AsyncClient:
        if (client := self._clients.get(at)) is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            uds = self._own_at if at == "unix" else None
            client = self._clients[at] = httpx.AsyncClient(
                base_url="http://host" if uds else at,
                transport=httpx.AsyncHTTPTransport(
                    uds=uds, limits=limits, socket_options=None if uds else _SOCKET_OPTIONS
                ),
                trust_env=False,
            )
        return client

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()


async def _refusal(response: httpx.Response) -> HostRefused:
    try:
        error = (await HostClient.whole(response))["error"]
        retry = response.headers.get("retry-after", "")
        return HostRefused(
            error["code"], response.status_code, error["message"], int(retry) if retry.isdigit() else None
        )
    except (ValueError, KeyError, TypeError):
        return HostRefused(
            "sandbox_error", 502, f"The sandbox's host answered with status {response.status_code}.", None
        )
