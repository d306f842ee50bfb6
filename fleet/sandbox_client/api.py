"""The API's sandboxes: made, found, and taken up again."""

from types import TracebackType
from typing import Any, Self

from sandfleet.fleet.sandbox_client.sandbox import Sandbox
from sandfleet.fleet.sandbox_client.wire import Wire

_ANSWER_S = 180.0


class SandboxApi:
    """All methods raise ApiError, and httpx.HTTPError when the API does not answer."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = _ANSWER_S) -> None:
        self._wire = Wire(url, api_key, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def create(
        self,
        template: str = "default",
        *,
        ttl_s: float | None = None,
        metadata: dict[str, Any] | None = None,
        snapshot_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """A new sandbox, ready for commands. ``snapshot_id``: whose files it begins with. It ends after ``ttl_s``: an hour if
        left out, or the template's lifetime if that is less. Asked again with the same ``idempotency_key`` and wishes the API
        gives the sandbox that it has made, as after a connection that broke."""
        body: dict[str, Any] = {"template": template, "metadata": metadata or {}}
        if ttl_s is not None:
            body["ttl_s"] = ttl_s
        if snapshot_id is not None:
            body["snapshot_id"] = snapshot_id
        once = None if idempotency_key is None else {"idempotency-key": idempotency_key}
        made = await self._wire.json("POST", "/sandboxes", body, headers=once, patient=True)
        return Sandbox(self._wire, made)

    async def get(self, sandbox_id: str) -> Sandbox:
        """One that is there."""
        return Sandbox(self._wire, await self._wire.json("GET", f"/sandboxes/{sandbox_id}"))

    async def search(
        self,
        *,
        metadata: dict[str, Any] | None = None,
        template: str | None = None,
        limit: int = 10,
        offset: int = 0,
    ) -> list[dict[str, Any]]:
        """Those that are there, newest first, as the API shows them."""
        body: dict[str, Any] = {"metadata": metadata or {}, "limit": limit, "offset": offset}
        if template is not None:
            body["template"] = template
        found: list[dict[str, Any]] = await self._wire.json("POST", "/sandboxes/search", body)
        return found

    async def snapshots(self, *, run_id: str | None = None, limit: int = 10) -> list[dict[str, Any]]:
        """The caller's snapshots, or those of a run, newest first."""
        path = "/snapshots" if run_id is None else f"/runs/{run_id}/snapshots"
        found: list[dict[str, Any]] = await self._wire.json("GET", path, params={"limit": limit})
        return found

    async def aclose(self) -> None:
        """Close all connections; sandboxes stay."""
        await self._wire.aclose()
