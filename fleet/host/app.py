"""The host's HTTP API, as ``docs/sandbox-protocol.md`` describes it. The token alone says whose sandbox is meant."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web
from pydantic import Field, ValidationError

from sandfleet.fleet.host.asked import FENCE, GOOD_UNTIL, Body, fence_of
from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.command_routes import CommandRoutes, invalid
from sandfleet.fleet.host.file_routes import FileRoutes
from sandfleet.fleet.host.process_routes import ProcessRoutes
from sandfleet.fleet.host.registry import Registry
from sandfleet.shared import sandbox_token, tracing
from sandfleet.shared.errors import HostUnavailable, SandfleetError
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.snapshots import Snapshot
from sandfleet.shared.templates import DEFAULT

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 * 1024 * 1024  # of a JSON request; file content is streamed and bounded by the sandbox
_CUT_OFF_S = 15.0  # without PostgreSQL for this long, no new sandbox is made

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SPAN: web.RequestKey[tracing.Span] = web.RequestKey("span", tracing.Span)


class AcquireRequest(Body):
    """What the run's sandbox is made from if it has none yet."""

    template: str = Field(DEFAULT, max_length=63)
    anew: bool = False
    """Whether one that was made for an earlier attempt gives way to a new one."""


class SnapshotRequest(Body):
    """Why the workspace is kept."""

    reason: Literal["request", "interrupt"] = "request"


class HostApi:
    """The routes over a registry of sandboxes."""

    def __init__(
        self, settings: Settings, registry: Registry, clock: DatabaseClock, about: dict[str, Any]
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._clock = clock
        self._about = about

    def application(self) -> web.Application:
        """The aiohttp application."""
        application = web.Application(
            middlewares=[_traced, self._errors, self._tokens], client_max_size=_MAX_BODY_BYTES
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.put("/sandbox", self._acquire),
                web.delete("/sandbox", self._remove),
                web.post("/sandbox/snapshot", self._snapshot),
                *CommandRoutes(self._registry).table(),
                *FileRoutes(self._registry).table(),
                *ProcessRoutes(self._registry).table(),
            ]
        )
        return application

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except SandfleetError as error:
            return _failure(error)
        except ValidationError as error:
            return _failure(invalid(error))

    @web.middleware
    async def _tokens(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.route.resource is not None and request.path != "/health":
            now = self._clock.now()
            if now is None:
                raise HostUnavailable(
                    "This sandbox host has not reached PostgreSQL yet; try again.", retry_after_s=2
                )
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            fence, expires_at = sandbox_token.verify(self._settings.host_secret, token, now)
            self._registry.admit(fence)
            request[FENCE], request[GOOD_UNTIL] = fence, time.monotonic() + expires_at - now
            request[SPAN].set("sandfleet.run_id", str(fence.key.run_id))
            request[SPAN].set("sandfleet.attempt", fence.attempt)
            await self._registry.adopted(fence.key)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "status": "ok",
                **self._about,
                "sandboxes": len(self._registry),
                "room": self._registry.room(),
                "warm": self._registry.warm.ready,
                "draining": self._registry.draining,
                "database_age_s": self._clock.age_s(),
            }
        )

    async def _acquire(self, request: web.Request) -> web.Response:
        cut_off = (self._clock.age_s() or 0) > _CUT_OFF_S
        body = await request.read()
        asked = AcquireRequest.model_validate_json(body) if body else AcquireRequest()
        acquired = await self._registry.acquire(
            fence_of(request), asked.template, may_create=not cut_off, anew=asked.anew
        )
        restored = acquired.sandbox.restored
        return web.json_response(
            {
                "sandbox_id": acquired.sandbox.id,
                "template": acquired.sandbox.template.name,
                "created": acquired.created,
                "lost": acquired.lost,
                "restored": None if restored is None else _snapshot(restored),
            }
        )

    async def _snapshot(self, request: web.Request) -> web.Response:
        asked = SnapshotRequest.model_validate_json(await request.read())
        return web.json_response(_snapshot(await self._registry.snapshot(fence_of(request), asked.reason)))

    async def _remove(self, request: web.Request) -> web.Response:
        fence = request[FENCE]
        self._registry.dismiss(fence.key, fence.attempt)
        return web.Response(status=204)


@web.middleware
async def _traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Go on with the trace of whoever calls; without one a request is no part of any. The span of a command lasts until its
    end."""
    request[SPAN] = tracing.Span()
    parent = tracing.parse(request.headers.get("traceparent"))
    resource = request.match_info.route.resource
    if parent is None or resource is None or request.path == "/health" or not tracing.on():
        return await handler(request)
    about = {"http.request.method": request.method, "http.route": resource.canonical}
    with tracing.span(f"{request.method} {resource.canonical}", about, parent=parent, kind="server") as span:
        request[SPAN] = span
        response = await handler(request)
        span.set("http.response.status_code", response.status)
        if response.status >= 500:
            span.failed(str(response.status))
        return response


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "snapshot_id": str(snapshot.snapshot_id),
        "reason": snapshot.reason,
        "bytes": snapshot.bytes,
        "files": snapshot.files,
        "content_bytes": snapshot.content_bytes,
        "skipped": snapshot.skipped,
        "created_at": snapshot.created_at.isoformat(),
    }


def _failure(error: SandfleetError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    body = {"error": {"code": error.code, "message": error.message}}
    return web.json_response(body, status=error.status, headers=headers)
