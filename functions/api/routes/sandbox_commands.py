"""Commands in a sandbox: one request with all of the input, answered at the end or as events."""

import base64
import codecs
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field, StringConstraints, model_validator
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import ExactBody, Text
from sandfleet.functions.api.live import Live
from sandfleet.functions.api.requests import read, resources, unless_gone
from sandfleet.functions.api.responses import json_response
from sandfleet.functions.api.routes.sandboxes import use_of
from sandfleet.functions.api.sandbox_exec import Event, follow
from sandfleet.shared.errors import InvalidRequest, SandfleetError
from sandfleet.shared.streams import sse
from sandfleet.shared.streams.follow import StreamEvent

router = APIRouter(tags=["sandboxes"])

Argument = Annotated[Text, StringConstraints(max_length=128 * 1024)]


class TerminalSize(ExactBody):
    """Rows and columns of a terminal."""

    rows: int = Field(24, ge=1, le=1000)
    columns: int = Field(80, ge=1, le=1000)


class Command(ExactBody):
    """A command: a text for the sandbox's shell, or a list of arguments."""

    command: Argument | Annotated[list[Argument], Field(min_length=1)]
    cwd: Text | None = None
    """/workspace if left out."""
    env: dict[Text, Text] = Field(default_factory=dict)
    pty: TerminalSize | None = None
    """A terminal of its own; then all output is stdout."""


class ExecSandbox(Command):
    """A command with all of its input."""

    stdin: str | None = None
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """It is killed then, with all that it has started; the template's limit if left out."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """How stdin is given, and output is told. As text, what is no UTF-8 becomes U+FFFD."""

    @model_validator(mode="after")
    def _readable(self) -> "ExecSandbox":
        if self.stdin is not None and self.encoding == "base64":
            try:
                base64.b64decode(self.stdin, validate=True)
            except ValueError:
                raise ValueError("stdin: it is not base64") from None
        return self


@router.post("/sandboxes/{sandbox_id}/exec", openapi_extra=body_of(ExecSandbox))
async def execute(request: Request, sandbox_id: str) -> Response:
    """Run a command and answer when it has ended. A client that hangs up kills it."""
    body, events = await _begin(request, sandbox_id)
    return await unless_gone(request, _whole(events, body.encoding))


@router.post("/sandboxes/{sandbox_id}/exec/stream", openapi_extra=body_of(ExecSandbox))
async def stream(request: Request, sandbox_id: str) -> Response:
    """Run a command and stream its output. A client that hangs up kills it."""
    body, events = await _begin(request, sandbox_id)
    found = resources(request)
    first = await unless_gone(request, anext(events))
    frames = sse.body(_told(first, events, _Decoder(body.encoding)), found.settings.sse_heartbeat_s)
    return Live(
        frames, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS, closing=found.closing, may_end_early=False
    )


async def _begin(request: Request, sandbox_id: str) -> tuple[ExecSandbox, AsyncGenerator[Event]]:
    use = use_of(request, sandbox_id)
    body = await read(request, ExecSandbox)
    window_s = resources(request).settings.response_window_s
    if window_s and body.timeout_s is not None and body.timeout_s > window_s:
        raise InvalidRequest(
            f"timeout_s: responses end after {window_s:g} s here; start what takes longer in the background"
        )
    command = body.model_dump(exclude={"encoding", "stdin"})
    command["timeout_s"] = body.timeout_s or window_s or None
    if body.stdin is not None:
        text = body.stdin
        command["stdin"] = (
            text if body.encoding == "base64" else base64.b64encode(text.encode("utf-8", "replace")).decode()
        )
    return body, follow(resources(request), use, command)


async def _whole(events: AsyncGenerator[Event], encoding: str) -> Response:
    kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    async with aclosing(events):
        async for kind, value in events:
            if isinstance(value, bytes):
                kept[kind].append(value)
            elif kind == "exit":
                output = {name: _shown(b"".join(pieces), encoding) for name, pieces in kept.items()}
                return json_response({**value, **output})
    raise AssertionError("a command that neither ends nor fails")


async def _told(
    first: Event, events: AsyncGenerator[Event], decoder: "_Decoder"
) -> AsyncGenerator[StreamEvent]:
    """Events of the stream; what goes wrong from here on is one, too."""
    async with aclosing(events):
        event: Event | None = first
        try:
            while event is not None:
                kind, value = event
                if isinstance(value, bytes):
                    if text := decoder.next(kind, value):
                        yield _frame(kind, {"data": text})
                else:
                    for name, text in decoder.rest() if kind == "exit" else ():
                        yield _frame(name, {"data": text})
                    yield _frame(kind, value)
                event = await anext(events, None)
        except SandfleetError as error:
            yield _frame("error", {"error": error.code, "message": error.message, **error.extra})


def _frame(kind: str, value: dict[str, Any]) -> StreamEvent:
    return StreamEvent(None, kind, orjson.dumps(value).decode())


def _shown(data: bytes, encoding: str) -> str:
    return base64.b64encode(data).decode() if encoding == "base64" else data.decode("utf-8", "replace")


class _Decoder:
    """Output in pieces, with characters that were cut between pieces kept whole."""

    def __init__(self, encoding: str) -> None:
        self._plain = encoding != "base64"
        make = codecs.getincrementaldecoder("utf-8")
        self._streams = {name: make("replace") for name in ("stdout", "stderr")}

    def next(self, stream: str, data: bytes) -> str:
        return self._streams[stream].decode(data) if self._plain else base64.b64encode(data).decode()

    def rest(self) -> list[tuple[str, str]]:
        """What was cut at the very end."""
        ends = [(name, decoder.decode(b"", final=True)) for name, decoder in self._streams.items()]
        return [(name, text) for name, text in ends if text]
