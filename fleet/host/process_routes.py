"""Routes for background processes."""

import base64

from aiohttp import web
from pydantic import Field

from sandfleet.fleet.host import processes
from sandfleet.fleet.host.asked import Body, TerminalSize, flag, integer, part, sandbox_of
from sandfleet.fleet.host.command_routes import CommandRequest
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.sandbox_agent import wire

_MAX_WAIT_MS = 60_000
_PIECE_BYTES = 64 * 1024


class StartRequest(CommandRequest):
    """A command that goes on in the background; without ``stdin`` it reads the end at once."""

    stdin: bool = False
    hold: bool = False
    """Whether it waits when nobody reads its output."""


class SignalRequest(Body):
    """A signal by its number."""

    signal: int = Field(ge=1, le=64)


class ProcessRoutes:
    """``/sandbox/processes``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def table(self) -> list[web.RouteDef]:
        """The routes."""
        one = "/sandbox/processes/{process}"
        return [
            web.post("/sandbox/processes", self._start),
            web.get("/sandbox/processes", self._list),
            web.get(one, self._wait),
            web.delete(one, self._kill),
            web.get(f"{one}/output", self._read),
            web.put(f"{one}/stdin", self._write),
            web.post(f"{one}/signal", self._signal),
            web.post(f"{one}/resize", self._resize),
        ]

    async def _start(self, request: web.Request) -> web.Response:
        asked = StartRequest.model_validate_json(await request.read())
        sandbox, fence = sandbox_of(self._registry, request)
        spec = {**asked.spec(), "stdin": asked.stdin, "hold": asked.hold}
        return web.json_response(await processes.start(sandbox, fence, spec))

    async def _list(self, request: web.Request) -> web.Response:
        found = await processes.list_all(*sandbox_of(self._registry, request))
        return web.json_response({"processes": found})

    async def _wait(self, request: web.Request) -> web.Response:
        wait_s = integer(request, "wait_ms", 0, _MAX_WAIT_MS) / 1000
        return await self._tell(request, "wait", wait_s=wait_s)

    async def _kill(self, request: web.Request) -> web.Response:
        return await self._tell(request, "kill", forget=not flag(request, "keep"))

    async def _read(self, request: web.Request) -> web.Response:
        offset = integer(request, "offset", 0, 2**53)
        limit = integer(request, "limit", wire.RING, wire.RING)
        wait_s = integer(request, "wait_ms", 0, _MAX_WAIT_MS) / 1000
        sandbox, fence = sandbox_of(self._registry, request)
        state, content = await processes.read(
            sandbox, fence, part(request, "process"), offset=offset, limit=limit, wait_s=wait_s
        )
        return web.json_response({**state, "data": base64.b64encode(content).decode()})

    async def _write(self, request: web.Request) -> web.Response:
        sandbox, fence = sandbox_of(self._registry, request)
        content = request.content.iter_chunked(_PIECE_BYTES)
        close = flag(request, "close")
        return web.json_response(
            await processes.write(sandbox, fence, part(request, "process"), content, close)
        )

    async def _signal(self, request: web.Request) -> web.Response:
        asked = SignalRequest.model_validate_json(await request.read())
        return await self._tell(request, "signal", signal=asked.signal)

    async def _resize(self, request: web.Request) -> web.Response:
        asked = TerminalSize.model_validate_json(await request.read())
        return await self._tell(request, "resize", **asked.model_dump())

    async def _tell(self, request: web.Request, do: str, **more: object) -> web.Response:
        sandbox, fence = sandbox_of(self._registry, request)
        return web.json_response(await processes.tell(sandbox, fence, do, part(request, "process"), **more))
