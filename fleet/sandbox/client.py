"""The HTTP client of a sandbox host, as ``docs/sandbox-protocol.md`` describes its API. One per process."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from json import dumps, loads
from pathlib import Path
from typing import Any

import aiohttp

from sandfleet.fleet.sandbox.attached import AttachedCommand
from sandfleet.fleet.sandbox.errors import StaleAttempt, from_host
from sandfleet.shared import tracing
from sandfleet.shared.errors import HostAway, HostBroke, HostUnavailable, SandboxError, SandfleetError
from sandfleet.shared.fault_points import reach
from sandfleet.shared.sandbox_token import SandboxTokenInvalid
from sandfleet.shared.templates import DEFAULT

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 120.0
_GRACE_S = 30.0  # for a command beyond its own time limit: the host's kill ladder takes less
_PIECE_BYTES = 256 * 1024
_MAX_MESSAGE_BYTES = 1024 * 1024  # of a websocket
_HEARTBEAT_S = 20.0
_HANDSHAKE: dict[int, type[SandfleetError]] = {401: SandboxTokenInvalid, 403: StaleAttempt}


class SandboxClient:
    """Calls to one host, by its unix socket or its URL. All methods raise SandboxError, and Superseded for a stale attempt.

    Every call takes the token that says whose sandbox is meant.
    """

    def __init__(self, address: Path | str) -> None:
        """``address`` is the path of a unix socket, or ``http://HOST:PORT``."""
        self._address = address
        self._session: aiohttp.ClientSession | None = None  # made at first use, on the loop that uses it

    async def health(self) -> dict[str, Any]:
        """What the host says of itself: ``host_id``, ``room`` and more."""
        return await self.call("GET", "/health", "")

    async def acquire(self, token: str, template: str = DEFAULT) -> dict[str, Any]:
        """Get the run's sandbox, created from ``template`` if it has none.

        Gives ``sandbox_id``, ``template``, ``created``, ``lost`` with why a previous one ended, and ``restored`` with
        the snapshot (``snapshot_id``, ``created_at``, ``reason``) that its workspace began with, or None.
        """
        return await self.call("PUT", "/sandbox", token, json={"template": template})

    async def snapshot(self, token: str, reason: str) -> dict[str, Any]:
        """Keep the workspace of the run's sandbox; the host's answer describes the snapshot."""
        return await self.call("POST", "/sandbox/snapshot", token, json={"reason": reason})

    async def remove(self, token: str) -> None:
        """Remove the run's sandbox, in the background; without one this does nothing."""
        async with self._answer("DELETE", "/sandbox", token):
            pass

    async def exec(
        self, token: str, request: dict[str, Any], timeout_s: float | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events of a command: ``stdout`` and ``stderr`` with ``data`` as bytes, then one ``exit``.

        Closing the generator before its end kills the command's process tree.
        """
        limit_s = None if timeout_s is None else timeout_s + _GRACE_S
        reach("command.before")
        async with self._answer(
            "POST", "/sandbox/exec", token, limit_s, data=_body(dumps(request).encode())
        ) as response:
            async for line in response.content:
                event: dict[str, Any] = loads(line)
                if event["event"] == "error":
                    raise from_host(event["code"], event["message"])
                if "data" in event:
                    event["data"] = base64.b64decode(event["data"])
                yield event
                if event["event"] == "exit":
                    return
        raise HostBroke("The sandbox host went away while the command ran.")

    async def read(self, token: str, path: str, offset: int, limit: int) -> bytes:
        """Content of a file from ``offset``, at most ``limit`` bytes."""
        params = {"path": _sendable(path), "offset": str(offset), "limit": str(limit)}
        async with self._answer("GET", "/sandbox/file", token, params=params) as response:
            return await response.read()

    async def write(
        self, token: str, path: str, data: bytes, mode: int | None, *, append: bool = False
    ) -> None:
        """Replace a file, or append to it, and make its directories.

        ``mode`` (permission bits) defaults to the old file's, or 644.
        """
        params = {"path": _sendable(path), "append": str(int(append))}
        if mode is not None:
            params["mode"] = str(mode)
        await self.call("PUT", "/sandbox/file", token, params=params, data=data)

    async def list(self, token: str, path: str) -> dict[str, Any]:
        """``entries`` of a directory (name, kind, size in bytes, modified_s) and whether they are ``truncated``."""
        return await self.call("GET", "/sandbox/files", token, params={"path": path})

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        token: str,
        *,
        params: Mapping[str, str | int] | None = None,
        json: Any = None,
        data: bytes | None = None,
    ) -> dict[str, Any]:
        """Any other request of the host's API: its JSON answer, empty if it has none."""
        sent: dict[str, Any] = {} if data is None else {"data": _body(data)}
        if json is not None:
            sent["data"] = _body(dumps(json).encode())
        if params is not None:
            sent["params"] = {name: _sendable(str(value)) for name, value in params.items()}
        async with self._answer(method, path, token, **sent) as response:
            answer: dict[str, Any] = {} if response.status == 204 else await response.json()
            return answer

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, token: str, limit_s: float | None = _ANSWER_TIMEOUT_S, **body: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=_CONNECT_TIMEOUT_S)
        with self._explained():
            async with self._opened().request(
                method, path, headers=_headers(token), timeout=timeout, **body
            ) as response:
                if response.status >= 400:
                    raise await _failure(response)
                yield response

    async def attach(self, token: str, request: dict[str, Any]) -> AttachedCommand:
        """Start a command whose input and output go on at once; the caller closes what this returns."""
        with self._explained():
            try:
                socket = await self._opened().ws_connect(
                    "/sandbox/attach",
                    headers=_headers(token),
                    max_msg_size=_MAX_MESSAGE_BYTES,
                    heartbeat=_HEARTBEAT_S,
                )
            except aiohttp.WSServerHandshakeError as error:
                refused = _HANDSHAKE.get(error.status, HostUnavailable)
                raise refused(f"The sandbox host refused the command's token ({error.status}).") from error
            command = AttachedCommand(socket)
            try:
                await command.start(request)
            except BaseException:
                await command.close()
                raise
            return command

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector: aiohttp.BaseConnector
            if isinstance(self._address, Path):
                base, connector = "http://host", aiohttp.UnixConnector(str(self._address), limit=0)
            else:
                base, connector = self._address, aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                base,
                connector=connector,
                read_bufsize=2**18,  # a line with a full frame in base64 is longer than the default of 64 KiB
            )
        return self._session

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Failures of the connection, in words."""
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise HostAway(
                f"No sandbox host answers at {self._address}: start one (sandfleet dev, or "
                "python -m sandfleet.fleet.host) and set SANDFLEET_HOST_SOCKET to its socket."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise HostBroke("The connection to the sandbox host broke.") from error


def _headers(token: str) -> dict[str, str]:
    """Whose sandbox is meant, and the span that the host goes on from."""
    traceparent = tracing.current_traceparent()
    return {"Authorization": f"Bearer {token}", **({"traceparent": traceparent} if traceparent else {})}


async def _failure(response: aiohttp.ClientResponse) -> SandfleetError:
    try:
        error = (await response.json())["error"]
        return from_host(error["code"], error["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ContentTypeError):
        return SandboxError(f"The sandbox host answered with status {response.status}.")


def _body(data: bytes) -> bytes | AsyncIterator[bytes]:
    """The body in pieces if it is large, so that sending it does not hold up the event loop."""
    return data if len(data) <= _PIECE_BYTES else _pieces(data)


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


def _sendable(path: str) -> str:
    return path.encode("utf-8", "replace").decode()
