"""A small asynchronous client of the Docker Engine API, over its unix socket or TCP."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterable
from typing import Any, Self

import aiohttp

from sandfleet.fleet.host import metrics
from sandfleet.shared.errors import SandfleetError

_NEWEST = (1, 44)  # the newest API version that this client was written against
_CALL_TIMEOUT_S = 60.0
_RETRY_PAUSE_S = 0.25
_REPEATABLE = ("GET", "DELETE")
# Four calls per core keep a busy engine busy; more only make each one slower (about 10 starts/s on two cores).
_CALLS_AT_ONCE = 4 * (os.cpu_count() or 1)


class EngineError(SandfleetError):
    """The Docker Engine refused a call; ``http_status`` is its own status."""

    code = "engine_error"
    status = 502

    def __init__(self, message: str, http_status: int) -> None:
        super().__init__(message)
        self.http_status = http_status


class EngineUnreachable(SandfleetError):
    """No Docker Engine answers: start it, or point DOCKER_HOST at it, or set SANDFLEET_SANDBOX=bwrap."""

    code = "engine_unreachable"
    status = 503


class Engine:
    """One Docker Engine. Use as an async context manager; at most 4 calls per core are under way at once.

    Once it has answered, it may be away for ``patience_s`` at a call: it restarts. Calls that it has not taken are
    repeated, and others that may be.
    """

    def __init__(self, docker_host: str, patience_s: float = 0.0) -> None:
        self._docker_host = docker_host
        self._wish_s = patience_s
        self._patience_s = 0.0
        self._slots = asyncio.Semaphore(_CALLS_AT_ONCE)
        self._prefix = ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        scheme, _, rest = self._docker_host.partition("://")
        connector: aiohttp.BaseConnector
        if scheme == "unix":
            connector, base = aiohttp.UnixConnector(rest, limit=0), "http://engine"
        elif scheme in ("tcp", "http"):
            connector, base = aiohttp.TCPConnector(limit=0), f"http://{rest}"
        else:
            raise EngineUnreachable(
                f"DOCKER_HOST must begin with unix:// or tcp://, not {self._docker_host!r}."
            )
        self._session = aiohttp.ClientSession(
            base, connector=connector, timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        )
        try:
            version = await self.call("GET", "/version")
        except BaseException:
            await self._session.close()
            raise
        chosen = max(_parse(version["MinAPIVersion"]), min(_parse(version["ApiVersion"]), _NEWEST))
        self._prefix = f"/v{chosen[0]}.{chosen[1]}"
        self._patience_s = self._wish_s
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | list[tuple[str, str]] | None = None,
        body: Any = None,
        data: AsyncIterable[bytes] | None = None,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> Any:
        """Do one call; return the decoded answer (a list for a stream of objects), None for an empty one.

        Raises EngineError on any status of 400 or above, and on an error inside a progress stream;
        EngineUnreachable when there is no answer.
        """
        asked = {
            "params": params,
            "json": body,
            "data": data,
            "timeout": aiohttp.ClientTimeout(total=timeout_s),
        }
        patient_until = time.monotonic() + self._patience_s
        while True:
            try:
                status, text = await self._once(method, path, asked)
                break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                not_taken = isinstance(error, aiohttp.ClientConnectorError)
                again = not_taken or (method in _REPEATABLE and not isinstance(error, TimeoutError))
                if not again or time.monotonic() > patient_until:
                    reason = str(error) or type(error).__name__
                    raise EngineUnreachable(
                        f"The Docker Engine at {self._docker_host} does not answer ({reason}). Start it, set "
                        "DOCKER_HOST, or set SANDFLEET_SANDBOX=bwrap."
                    ) from error
            await asyncio.sleep(_RETRY_PAUSE_S)
        if status >= 400:
            raise EngineError(_message(text), status)
        if not text.strip():
            return None
        if "\n" not in text.strip():
            return json.loads(text)
        parts = [json.loads(line) for line in text.splitlines() if line.strip()]
        for part in parts:
            if isinstance(part, dict) and "error" in part:
                raise EngineError(str(part["error"]), status)
        return parts

    async def _once(self, method: str, path: str, asked: dict[str, Any]) -> tuple[int, str]:
        assert self._session is not None, "use the engine as a context manager"
        with metrics.ENGINE_QUEUE.track_inprogress():
            await self._slots.acquire()
        try:
            with metrics.ENGINE_CALLS.labels(_kind(method, path)).time():
                async with self._session.request(method, self._prefix + path, **asked) as response:
                    return response.status, await response.text(errors="replace")
        finally:
            self._slots.release()

    async def image(self, name: str) -> dict[str, Any] | None:
        """The engine's description of an image, or None if it does not have it."""
        try:
            found: dict[str, Any] = await self.call("GET", f"/images/{name}/json")
        except EngineError as error:
            if error.http_status == 404:
                return None
            raise
        return found

    async def containers(self, *labels: str) -> list[dict[str, Any]]:
        """Containers in any state that carry all these labels (``key=value``)."""
        filters = json.dumps({"label": list(labels)})
        found: list[dict[str, Any]] = await self.call(
            "GET", "/containers/json", params={"all": "true", "filters": filters}
        )
        return found

    async def remove_container(self, container_id: str) -> None:
        """Kill and remove a container; one that is gone or going already is fine."""
        try:
            await self.call("DELETE", f"/containers/{container_id}", params={"force": "true", "v": "true"})
        except EngineError as error:
            going = error.http_status == 409 and "already in progress" in error.message
            if error.http_status != 404 and not going:
                raise


def _kind(method: str, path: str) -> str:
    """A call without the names in it, e.g. ``POST containers/start``."""
    parts = path.strip("/").split("/")
    last = parts[-1]
    return f"{method} {parts[0]}/{last}" if len(parts) > 2 or last == "create" else f"{method} {parts[0]}"


def _parse(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor)


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or "no message"
