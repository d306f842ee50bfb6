"""The host's HTTP API, as ``docs/sandbox-protocol.md`` describes it. The token alone says whose sandbox is meant."""

import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from aiohttp import web
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Event
from sandfleet.fleet.sandbox.errors import HostUnavailable
from sandfleet.shared import sandbox_token
from sandfleet.shared.errors import InvalidRequest, SandfleetError
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 * 1024 * 1024  # of a JSON request; file content is streamed and bounded by the sandbox
_MAX_READ_BYTES = 1024 * 1024 * 1024
_CUT_OFF_S = 15.0  # without PostgreSQL for this long, no new sandbox is made
_FENCE: web.RequestKey[Fence] = web.RequestKey("fence", Fence)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Argument = Annotated[str, StringConstraints(max_length=128 * 1024)]


class ExecRequest(BaseModel):
    """A command: ``command`` is a list of arguments, or a text for the sandbox's shell."""

    model_config = ConfigDict(extra="forbid")

    command: Argument | Annotated[list[Argument], Field(min_length=1)]
    cwd: str | None = None
    env: dict[str, str] = {}
    stdin: Base64Bytes | None = None
    timeout_s: float | None = Field(None, gt=0)


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
            middlewares=[self._errors, self._tokens], client_max_size=_MAX_BODY_BYTES
        )
        application.add_routes(
            [
                web.get("/health", self._health),
                web.put("/sandbox", self._acquire),
                web.delete("/sandbox", self._remove),
                web.post("/sandbox/exec", self._exec),
                web.get("/sandbox/file", self._read),
                web.put("/sandbox/file", self._write),
                web.get("/sandbox/files", self._list),
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
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"])) or "body"
            return _failure(InvalidRequest(f"{field}: {problem['msg']}"))

    @web.middleware
    async def _tokens(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.route.resource is not None and request.path != "/health":
            now = self._clock.now()
            if now is None:
                raise HostUnavailable(
                    "This sandbox host has not reached PostgreSQL yet; try again.", retry_after_s=2
                )
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            fence = sandbox_token.verify(self._settings.host_secret, token, now).fence
            self._registry.admit(fence)
            request[_FENCE] = fence
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "status": "ok",
                **self._about,
                "sandboxes": len(self._registry),
                "room": self._registry.room,
                "database_age_s": self._clock.age_s(),
            }
        )

    async def _acquire(self, request: web.Request) -> web.Response:
        cut_off = (self._clock.age_s() or 0) > _CUT_OFF_S
        acquired = await self._registry.acquire(request[_FENCE], may_create=not cut_off)
        return web.json_response(
            {"sandbox_id": acquired.sandbox.id, "created": acquired.created, "lost": acquired.lost}
        )

    async def _remove(self, request: web.Request) -> web.Response:
        self._registry.dismiss(request[_FENCE].key)
        return web.Response(status=204)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        asked = ExecRequest.model_validate_json(await request.read())
        settings = self._settings
        spec: dict[str, Any] = {
            "shell" if isinstance(asked.command, str) else "argv": asked.command,
            "cwd": asked.cwd,
            "env": asked.env,
            "timeout_s": min(
                asked.timeout_s or settings.sandbox_command_timeout_s, settings.sandbox_lifetime_s
            ),
            "output_bytes": settings.sandbox_output_bytes,
        }
        fence = request[_FENCE]
        sandbox = self._registry.find(fence)
        async with contextlib.aclosing(sandbox.exec(fence, spec, asked.stdin)) as events:
            return await _stream_events(request, events)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        fence = request[_FENCE]
        offset = _number(request, "offset", 0, 2**62)
        limit = _number(request, "limit", _MAX_READ_BYTES, _MAX_READ_BYTES)
        sandbox = self._registry.find(fence)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        async with contextlib.aclosing(sandbox.read(fence, _path(request), offset, limit)) as parts:
            first = await anext(parts, b"")
            await response.prepare(request)
            await response.write(first)
            # An error from here on leaves the response without its last chunk, which the client sees.
            async for part in parts:
                await response.write(part)
        await response.write_eof()
        return response

    async def _write(self, request: web.Request) -> web.Response:
        fence = request[_FENCE]
        mode = _number(request, "mode", 0, 0o777) if "mode" in request.query else None
        sandbox = self._registry.find(fence)
        return web.json_response(
            await sandbox.write(fence, _path(request), mode, request.content.iter_chunked(64 * 1024))
        )

    async def _list(self, request: web.Request) -> web.Response:
        fence = request[_FENCE]
        return web.json_response(await self._registry.find(fence).list(fence, _path(request)))


async def _stream_events(request: web.Request, events: AsyncIterator[Event]) -> web.StreamResponse:
    """Events as one JSON object a line. What fails before the first event has an HTTP status; later, a line."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    event: Event | None = await anext(events, None)
    await response.prepare(request)
    try:
        while event is not None:
            kind, value = event
            data = {"data": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
            await response.write(json.dumps({"event": kind, **data}).encode() + b"\n")
            event = await anext(events, None)
    except SandfleetError as error:
        line = {"event": "error", "code": error.code, "status": error.status, "message": error.message}
        await response.write(json.dumps(line).encode() + b"\n")
    await response.write_eof()
    return response


def _failure(error: SandfleetError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    body = {"error": {"code": error.code, "message": error.message}}
    return web.json_response(body, status=error.status, headers=headers)


def _path(request: web.Request) -> str:
    path = request.query.get("path", "")
    if not path or "\0" in path or len(path) > 4096:
        raise InvalidRequest("path: it must have 1 to 4096 characters and no NUL")
    return path


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) > most:
        raise InvalidRequest(f"{name}: it must be an integer from 0 to {most}")
    return int(text)
