"""Files of a sandbox. Paths lie under /workspace or /tmp; relative ones start in /workspace."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import ExactBody, Text
from sandfleet.functions.api.host_ask import Ask, Once
from sandfleet.functions.api.live import Cut, Live
from sandfleet.functions.api.requests import (
    discard,
    query_bool,
    query_int,
    query_only,
    read,
    resources,
    unless_gone,
)
from sandfleet.functions.api.responses import json_response, no_content
from sandfleet.functions.api.routes.sandboxes import use_of
from sandfleet.shared.errors import BodyTooLarge, HostBroke, InvalidRequest

router = APIRouter(tags=["sandboxes"])

_ALL = 2**62  # bytes of a file

Path = Annotated[Text, StringConstraints(min_length=1, max_length=4096)]


class SearchFiles(ExactBody):
    """Below ``path``, at most ``limit`` findings in at most ``timeout_s``."""

    path: Path = "/workspace"
    pattern: Path
    limit: int = Field(1000, ge=1, le=10_000)
    timeout_s: float = Field(10, gt=0, le=60)


class Grep(SearchFiles):
    """Lines that fit a regular expression (Python's), or contain a text if ``fixed``, in files that fit ``glob``."""

    glob: Path | None = None
    ignore_case: bool = False
    fixed: bool = False


class Directory(ExactBody):
    """A directory."""

    path: Path


class Move(Directory):
    """From ``path`` to ``to``, over a file there if ``replace``."""

    to: Path
    replace: bool = False


@router.get("/sandboxes/{sandbox_id}/file")
async def download(request: Request, sandbox_id: str) -> Response:
    """The bytes of a file, all of them unless limited. Query: path, offset, limit."""
    query_only(request, "path", "offset", "limit")
    use = use_of(request, sandbox_id)
    found = resources(request)
    response = await unless_gone(request, use.open(Ask("GET", "/sandbox/file", wanted_part(request))))

    async def body() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(found.hosts.pieces(response)) as pieces:
                async for piece in pieces:
                    yield piece
        except HostBroke:
            raise Cut from None  # nobody takes a part for the whole

    return Live(
        body(),
        media_type="application/octet-stream",
        headers={"cache-control": "no-store"},
        closing=found.closing,
        may_end_early=False,
    )


def wanted_part(request: Request) -> dict[str, str | int]:
    """What a host is asked for. No limit unless there is one: hosts differ in how high one they take."""
    params: dict[str, str | int] = {
        "path": _path(request),
        "offset": query_int(request, "offset", 0, 0, _ALL),
    }
    if request.query_params.get("limit"):
        params["limit"] = query_int(request, "limit", _ALL, 0, _ALL)
    return params


@router.put("/sandboxes/{sandbox_id}/file")
async def upload(request: Request, sandbox_id: str) -> Response:
    """Replace a file by the body in one step, or append the body to it; makes its directories. Query: path, mode, append."""
    query_only(request, "path", "mode", "append")
    use = use_of(request, sandbox_id)
    params: dict[str, str | int] = {"path": _path(request), "append": int(query_bool(request, "append"))}
    if "mode" in request.query_params:
        params["mode"] = query_int(request, "mode", 0, 0, 0o777)
    most = resources(request).settings.max_file_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        await discard(request.stream())
        raise _too_large(most)
    content = Once(_bounded(request, most))
    return json_response(await use.json(Ask("PUT", "/sandbox/file", params, content=content)))


async def _bounded(request: Request, most: int) -> AsyncIterator[bytes]:
    size = 0
    stream = request.stream()
    async for piece in stream:
        size += len(piece)
        if size > most:
            await discard(stream)
            raise _too_large(most)
        if piece:
            yield piece


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The file is larger than {most} bytes. Send it in parts, with append=1 from the second on."
    )


@router.delete("/sandboxes/{sandbox_id}/file")
async def remove(request: Request, sandbox_id: str) -> Response:
    """Remove a file, a link itself, or a directory: an empty one, or with all below it. Query: path, recursive."""
    query_only(request, "path", "recursive")
    use = use_of(request, sandbox_id)
    params: dict[str, str | int] = {
        "path": _path(request),
        "recursive": int(query_bool(request, "recursive")),
    }
    await use.json(Ask("DELETE", "/sandbox/file", params))
    return no_content()


@router.get("/sandboxes/{sandbox_id}/stat")
async def stat(request: Request, sandbox_id: str) -> Response:
    """Kind, size, mode and time of what a path leads to. Query: path."""
    query_only(request, "path")
    use = use_of(request, sandbox_id)
    return json_response(await use.json(Ask("GET", "/sandbox/stat", {"path": _path(request)})))


@router.get("/sandboxes/{sandbox_id}/files")
async def list_files(request: Request, sandbox_id: str) -> Response:
    """Entries of a directory. Query: path, /workspace if left out."""
    query_only(request, "path")
    use = use_of(request, sandbox_id)
    path = _path(request) if request.query_params.get("path") else "/workspace"
    return json_response(await use.json(Ask("GET", "/sandbox/files", {"path": path})))


@router.post("/sandboxes/{sandbox_id}/glob", openapi_extra=body_of(SearchFiles))
async def glob(request: Request, sandbox_id: str) -> Response:
    """Entries below a path whose names fit a pattern."""
    return json_response(await _do(request, sandbox_id, "glob", SearchFiles))


@router.post("/sandboxes/{sandbox_id}/grep", openapi_extra=body_of(Grep))
async def grep(request: Request, sandbox_id: str) -> Response:
    """Lines of files that fit a pattern."""
    return json_response(await _do(request, sandbox_id, "grep", Grep))


@router.post("/sandboxes/{sandbox_id}/mkdir", openapi_extra=body_of(Directory))
async def mkdir(request: Request, sandbox_id: str) -> Response:
    """Make a directory with those above it; one that exists is fine."""
    await _do(request, sandbox_id, "mkdir", Directory)
    return no_content()


@router.post("/sandboxes/{sandbox_id}/move", openapi_extra=body_of(Move))
async def move(request: Request, sandbox_id: str) -> Response:
    """Move a file, link or directory."""
    await _do(request, sandbox_id, "move", Move)
    return no_content()


@router.post("/sandboxes/{sandbox_id}/copy", openapi_extra=body_of(Move))
async def copy(request: Request, sandbox_id: str) -> Response:
    """Copy a file, or a directory with all below it."""
    await _do(request, sandbox_id, "copy", Move)
    return no_content()


async def _do(request: Request, sandbox_id: str, what: str, model: type[BaseModel]) -> dict[str, Any]:
    use = use_of(request, sandbox_id)
    body = (await read(request, model)).model_dump()
    return await unless_gone(request, use.json(Ask("POST", f"/sandbox/{what}", json=body)))


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path or "\0" in path or len(path) > 4096:
        raise InvalidRequest("path: it must have 1 to 4096 characters and no U+0000")
    return path.encode("utf-8", "replace").decode()
