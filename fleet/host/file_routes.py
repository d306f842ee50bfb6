"""Routes for files."""

import contextlib
from typing import Annotated

from aiohttp import web
from pydantic import Field, StringConstraints

from sandfleet.fleet.host import files
from sandfleet.fleet.host.asked import Body, Path, flag, integer, path, sandbox_of
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.sandbox_agent import wire

_ALL = 2**62  # bytes of a file; windows bound what is in memory of it
_PIECE_BYTES = 64 * 1024

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class Search(Body):
    """Below ``path``, at most ``limit`` findings in at most ``timeout_s``."""

    path: Path = "/workspace"
    pattern: Pattern
    limit: int = Field(1000, ge=1, le=wire.MAX_ENTRIES)
    timeout_s: float = Field(10, gt=0, le=60)


class Grep(Search):
    """Lines that fit a regular expression (Python's), or contain a text if ``fixed``, in files that fit ``glob``."""

    glob: Pattern | None = None
    ignore_case: bool = False
    fixed: bool = False


class Place(Body):
    """A path."""

    path: Path


class Move(Place):
    """From ``path`` to ``to``, over a file there if ``replace``."""

    to: Path
    replace: bool = False


class FileRoutes:
    """``/sandbox/file`` and the operations on many files."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def table(self) -> list[web.RouteDef]:
        """The routes."""
        return [
            web.get("/sandbox/file", self._read),
            web.put("/sandbox/file", self._write),
            web.delete("/sandbox/file", self._remove),
            web.get("/sandbox/stat", self._stat),
            web.get("/sandbox/files", self._list),
            web.post("/sandbox/glob", self._glob),
            web.post("/sandbox/grep", self._grep),
            web.post("/sandbox/mkdir", self._mkdir),
            web.post("/sandbox/move", self._move),
            web.post("/sandbox/copy", self._copy),
        ]

    async def _read(self, request: web.Request) -> web.StreamResponse:
        offset = integer(request, "offset", 0, _ALL)
        limit = integer(request, "limit", _ALL, _ALL)
        sandbox, fence = sandbox_of(self._registry, request)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        async with contextlib.aclosing(files.read(sandbox, fence, path(request), offset, limit)) as parts:
            first = await anext(parts, b"")
            await response.prepare(request)
            await response.write(first)
            # An error from here on leaves the response without its last chunk, which the client sees.
            async for part in parts:
                await response.write(part)
        await response.write_eof()
        return response

    async def _write(self, request: web.Request) -> web.Response:
        mode = integer(request, "mode", 0, 0o777) if "mode" in request.query else None
        append = flag(request, "append")
        sandbox, fence = sandbox_of(self._registry, request)
        content = request.content.iter_chunked(_PIECE_BYTES)
        return web.json_response(
            await files.write(sandbox, fence, path(request), content, mode=mode, append=append)
        )

    async def _remove(self, request: web.Request) -> web.Response:
        spec = {"path": path(request), "recursive": flag(request, "recursive")}
        await files.change(*sandbox_of(self._registry, request), "remove", spec)
        return web.Response(status=204)

    async def _stat(self, request: web.Request) -> web.Response:
        return web.json_response(await files.stat(*sandbox_of(self._registry, request), path(request)))

    async def _list(self, request: web.Request) -> web.Response:
        spec = {"path": path(request)}
        return web.json_response(await files.search(*sandbox_of(self._registry, request), "list", spec))

    async def _glob(self, request: web.Request) -> web.Response:
        return await self._search(request, "glob", Search.model_validate_json(await request.read()))

    async def _grep(self, request: web.Request) -> web.Response:
        return await self._search(request, "grep", Grep.model_validate_json(await request.read()))

    async def _search(self, request: web.Request, do: str, asked: Search) -> web.Response:
        spec = asked.model_dump()
        spec["most"] = spec.pop("limit")
        return web.json_response(await files.search(*sandbox_of(self._registry, request), do, spec))

    async def _mkdir(self, request: web.Request) -> web.Response:
        return await self._change(request, "mkdir", Place.model_validate_json(await request.read()))

    async def _move(self, request: web.Request) -> web.Response:
        return await self._change(request, "move", Move.model_validate_json(await request.read()))

    async def _copy(self, request: web.Request) -> web.Response:
        return await self._change(request, "copy", Move.model_validate_json(await request.read()))

    async def _change(self, request: web.Request, do: str, asked: Place) -> web.Response:
        await files.change(*sandbox_of(self._registry, request), do, asked.model_dump())
        return web.Response(status=204)
