"""Background processes of a sandbox: they outlive the request that starts them, and end with the sandbox.

One with a terminal is a shell for whoever reads its output as a stream and writes its input.
"""

import base64
import codecs
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import ExactBody
from sandfleet.functions.api.host_ask import Ask
from sandfleet.functions.api.live import Live
from sandfleet.functions.api.requests import (
    query_bool,
    query_int,
    query_only,
    read,
    read_body,
    resources,
    unless_gone,
)
from sandfleet.functions.api.responses import json_response
from sandfleet.functions.api.routes.sandbox_commands import Command, TerminalSize
from sandfleet.functions.api.routes.sandboxes import use_of
from sandfleet.functions.api.sandbox_use import Use
from sandfleet.shared.errors import InvalidRequest, SandfleetError
from sandfleet.shared.streams import sse
from sandfleet.shared.streams.follow import StreamEvent

router = APIRouter(tags=["sandboxes"])

_MOST_WAIT_MS = 60_000
_POLL_MS = 20_000
_KEPT_BYTES = 256 * 1024


class StartProcess(Command):
    """A command that goes on in the background."""

    stdin: bool = False
    """Whether input will be written; else it reads the end at once."""
    hold: bool = False
    """Whether it waits when nobody reads its output, which is lost else beyond the newest 256 KiB."""


class Signal(ExactBody):
    """A signal by its number."""

    signal: int = Field(ge=1, le=64)


@router.post("/sandboxes/{sandbox_id}/processes", status_code=201, openapi_extra=body_of(StartProcess))
async def start(request: Request, sandbox_id: str) -> Response:
    """Start a command in the background; its state."""
    use = use_of(request, sandbox_id)
    body = await read(request, StartProcess)
    return json_response(await use.json(Ask("POST", "/sandbox/processes", json=body.model_dump())), 201)


@router.get("/sandboxes/{sandbox_id}/processes")
async def list_processes(request: Request, sandbox_id: str) -> Response:
    """All background processes, also those that ended lately."""
    use = use_of(request, sandbox_id)
    return json_response((await use.json(Ask("GET", "/sandbox/processes")))["processes"])


@router.get("/sandboxes/{sandbox_id}/processes/{process}")
async def get(request: Request, sandbox_id: str, process: str) -> Response:
    """The state of one, at its end or after ``wait_ms``."""
    query_only(request, "wait_ms")
    use, path = _one(request, sandbox_id, process)
    params = {"wait_ms": query_int(request, "wait_ms", 0, 0, _MOST_WAIT_MS)}
    return json_response(await unless_gone(request, use.json(Ask("GET", path, params))))


@router.delete("/sandboxes/{sandbox_id}/processes/{process}")
async def kill(request: Request, sandbox_id: str, process: str) -> Response:
    """Kill one with all that it has started; its state. It is forgotten unless ``keep``."""
    query_only(request, "keep")
    use, path = _one(request, sandbox_id, process)
    params = {"keep": int(query_bool(request, "keep"))}
    return json_response(await use.json(Ask("DELETE", path, params)))


@router.get("/sandboxes/{sandbox_id}/processes/{process}/output")
async def output(request: Request, sandbox_id: str, process: str) -> Response:
    """Output from ``offset``, at most ``limit`` bytes; waits up to ``wait_ms`` if there is none yet. Query: encoding, too."""
    query_only(request, "offset", "limit", "wait_ms", "encoding")
    use, path = _one(request, sandbox_id, process)
    plain = _plain(request)
    params = {
        "offset": query_int(request, "offset", 0, 0, 10**11),
        "limit": query_int(request, "limit", _KEPT_BYTES, 1, _KEPT_BYTES),
        "wait_ms": query_int(request, "wait_ms", 0, 0, _MOST_WAIT_MS),
    }
    found = await unless_gone(request, use.json(Ask("GET", f"{path}/output", params)))
    if plain:
        found["data"] = base64.b64decode(found["data"]).decode("utf-8", "replace")
    return json_response(found)


@router.get("/sandboxes/{sandbox_id}/processes/{process}/output/stream")
async def stream(request: Request, sandbox_id: str, process: str) -> Response:
    """Output as it comes, from ``offset`` or after ``Last-Event-ID``, then ``exit``. Query: encoding, too."""
    query_only(request, "offset", "encoding")
    use, path = _one(request, sandbox_id, process)
    last = request.headers.get("last-event-id", "")
    offset = query_int(request, "offset", 0, 0, 10**11)
    if last:
        if not (last.isascii() and last.isdigit() and len(last) < 12):
            raise InvalidRequest("Last-Event-ID: not an offset")
        offset = int(last)
    plain = _plain(request)
    found = resources(request)
    await use.json(Ask("GET", path))  # what can be refused, is, before the stream begins
    events = _output(use, path, offset, plain, found.settings.response_window_s)
    return Live(
        sse.body(events, found.settings.sse_heartbeat_s),
        media_type=sse.MEDIA_TYPE,
        headers=sse.HEADERS,
        closing=found.closing,
        may_end_early=True,
    )


async def _output(
    use: Use, path: str, offset: int, plain: bool, window_s: float
) -> AsyncGenerator[StreamEvent]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    until = time.monotonic() + window_s if window_s else None
    try:
        while True:
            wait_ms = _POLL_MS
            if until is not None and (wait_ms := min(wait_ms, int((until - time.monotonic()) * 1000))) <= 0:
                return
            found = await use.json(Ask("GET", f"{path}/output", {"offset": offset, "wait_ms": wait_ms}))
            data = base64.b64decode(found["data"])
            offset = found["next_offset"]
            ended = not found["running"] and not data
            if data or ended:
                text = decoder.decode(data, final=ended) if plain else found["data"]
                if text or found["lost_bytes"]:
                    yield _event("output", {"data": text, "lost_bytes": found["lost_bytes"]}, offset)
            if ended:
                yield _event("exit", {"exit_code": found["exit_code"], "signal": found["signal"]}, offset)
                return
    except SandfleetError as error:
        yield _event("error", {"error": error.code, "message": error.message, **error.extra}, None)


def _event(name: str, value: dict[str, Any], offset: int | None) -> StreamEvent:
    return StreamEvent(None if offset is None else str(offset), name, orjson.dumps(value).decode())


@router.put("/sandboxes/{sandbox_id}/processes/{process}/stdin")
async def write(request: Request, sandbox_id: str, process: str) -> Response:
    """Write the body to its stdin or terminal; answers when it has taken all. Query: close."""
    query_only(request, "close")
    use, path = _one(request, sandbox_id, process)
    params = {"close": int(query_bool(request, "close"))}
    ask = Ask("PUT", f"{path}/stdin", params, content=await read_body(request))
    return json_response(await unless_gone(request, use.json(ask)))


@router.post("/sandboxes/{sandbox_id}/processes/{process}/signal", openapi_extra=body_of(Signal))
async def signal(request: Request, sandbox_id: str, process: str) -> Response:
    """Send a signal to its process group; its state."""
    use, path = _one(request, sandbox_id, process)
    body = await read(request, Signal)
    return json_response(await use.json(Ask("POST", f"{path}/signal", json=body.model_dump())))


@router.post("/sandboxes/{sandbox_id}/processes/{process}/resize", openapi_extra=body_of(TerminalSize))
async def resize(request: Request, sandbox_id: str, process: str) -> Response:
    """Give its terminal another size; its state."""
    use, path = _one(request, sandbox_id, process)
    body = await read(request, TerminalSize)
    return json_response(await use.json(Ask("POST", f"{path}/resize", json=body.model_dump())))


def _one(request: Request, sandbox_id: str, process: str) -> tuple[Use, str]:
    if not (process.isascii() and process.isdigit() and len(process) < 16):
        raise InvalidRequest("process: not a number")
    return use_of(request, sandbox_id), f"/sandbox/processes/{process}"


def _plain(request: Request) -> bool:
    encoding = request.query_params.get("encoding", "utf-8")
    if encoding not in ("utf-8", "base64"):
        raise InvalidRequest("encoding: use utf-8 or base64")
    return encoding == "utf-8"
