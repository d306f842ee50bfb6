"""Routes for commands: one request with all of the input, or a websocket with input and output at once."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from aiohttp import WSMsgType, web
from pydantic import Base64Bytes, Field, StringConstraints, TypeAdapter, ValidationError

from sandfleet.fleet.host.agent_link import Operation
from sandfleet.fleet.host.asked import Argument, Body, TerminalSize, sandbox_of
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Event
from sandfleet.shared.errors import InvalidRequest, SandfleetError
from sandfleet.shared.templates import Template

_MAX_MESSAGE_BYTES = 1024 * 1024  # of a websocket
_HEARTBEAT_S = 20.0  # a client that is gone without a word is noticed after about one and a half of these
_FIRST_MESSAGE_S = 10.0
_BEGIN_S = 0.25  # a command that says nothing for so long has begun, and its caller hears so
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
_LINES = {"Content-Type": "application/x-ndjson"}
STDOUT, STDERR = b"\x01", b"\x02"  # first byte of a binary message to the client


class CommandRequest(Body):
    """A command: ``command`` is a list of arguments, or a text for the sandbox's shell."""

    command: Argument | Annotated[list[Argument], Field(min_length=1)]
    cwd: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    pty: TerminalSize | None = None

    def spec(self) -> dict[str, Any]:
        """As the agent wants it."""
        spec = {
            "shell" if isinstance(self.command, str) else "argv": self.command,
            "cwd": self.cwd,
            "env": self.env,
        }
        return spec if self.pty is None else {**spec, "pty": self.pty.model_dump()}


class Offsets(Body):
    """Bytes of each stream that the caller has."""

    stdout: int = Field(ge=0, le=2**53)
    stderr: int = Field(ge=0, le=2**53)


class ExecRequest(CommandRequest):
    """A command with all of its input. By its ``name`` it can be followed again after the host was away."""

    stdin: Base64Bytes | None = None
    timeout_s: float | None = Field(None, gt=0)
    name: Name | None = None
    resume: Offsets | None = None

    def spec(self) -> dict[str, Any]:
        spec = super().spec()
        if self.name is not None:
            spec["name"] = self.name
        if self.resume is not None:
            spec["resume"] = self.resume.model_dump()
        return spec


class AttachRequest(CommandRequest):
    """A command whose input, if there is ``stdin``, comes in binary messages."""

    stdin: bool = False
    timeout_s: float | None = Field(None, gt=0)


class EndOfInput(Body):
    """No input follows."""

    input: Literal["eof"]


class Resize(Body):
    """The terminal has another size."""

    resize: TerminalSize


_CONTROL: TypeAdapter[EndOfInput | Resize] = TypeAdapter(EndOfInput | Resize)


def _limited(asked: ExecRequest | AttachRequest, template: Template) -> dict[str, Any]:
    timeout_s = asked.timeout_s or template.command_timeout_s
    return {
        **asked.spec(),
        "timeout_s": min(timeout_s, template.lifetime_s),
        "output_bytes": template.output,
    }


class CommandRoutes:
    """``/sandbox/exec`` and ``/sandbox/attach``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def table(self) -> list[web.RouteDef]:
        """The routes."""
        return [web.post("/sandbox/exec", self._exec), web.get("/sandbox/attach", self._attach)]

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        asked = ExecRequest.model_validate_json(await request.read())
        sandbox, fence = sandbox_of(self._registry, request)
        async with contextlib.aclosing(
            sandbox.exec(fence, _limited(asked, sandbox.template), asked.stdin)
        ) as events:
            return await _stream_events(request, events)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        # Refusals of the handshake have no body that a websocket client would see, so they come as an event.
        socket = web.WebSocketResponse(
            heartbeat=_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE_BYTES, compress=False
        )
        await socket.prepare(request)
        try:
            await self._run(request, socket)
        except SandfleetError as error:
            await _say(socket, _error_event(error))
        except ValidationError as error:
            await _say(socket, _error_event(invalid(error)))
        await socket.close()
        return socket

    async def _run(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        try:
            asked = AttachRequest.model_validate_json(await socket.receive_str(timeout=_FIRST_MESSAGE_S))
        except (TypeError, TimeoutError) as error:
            raise InvalidRequest("The first message must be the command, as JSON text.") from error
        sandbox, fence = sandbox_of(self._registry, request)
        spec = {**_limited(asked, sandbox.template), "stdin": asked.stdin}
        async with sandbox.command(fence, spec) as command:
            await _say(socket, {"event": "started"})
            hearing = asyncio.create_task(_hear(socket, command))
            telling = asyncio.create_task(_tell(socket, sandbox.events(command)))
            try:
                await asyncio.wait([hearing, telling], return_when=asyncio.FIRST_COMPLETED)
                if telling.done():
                    telling.result()
                else:
                    hearing.result()  # the client hung up, or said what cannot be understood
            finally:
                hearing.cancel()
                telling.cancel()
                await asyncio.gather(hearing, telling, return_exceptions=True)


async def _hear(socket: web.WebSocketResponse, command: Operation) -> None:
    """Pass on input and sizes until the client hangs up. InvalidRequest for anything else."""
    async for message in socket:
        if message.type == WSMsgType.BINARY:
            await command.send(message.data)
        elif message.type == WSMsgType.TEXT:
            try:
                control = _CONTROL.validate_json(message.data)
            except ValidationError as error:
                raise invalid(error) from error
            if isinstance(control, Resize):
                command.resize(control.resize.rows, control.resize.columns)
            else:
                await command.send_eof()


async def _tell(socket: web.WebSocketResponse, events: AsyncIterator[Event]) -> None:
    with contextlib.suppress(ConnectionError):  # who hung up is heard of elsewhere
        async for kind, value in events:
            if isinstance(value, bytes):
                await socket.send_bytes((STDOUT if kind == "stdout" else STDERR) + value)
            else:
                await socket.send_str(json.dumps({"event": kind, **value}))


async def _say(socket: web.WebSocketResponse, event: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):
        await socket.send_str(json.dumps(event))


async def _stream_events(request: web.Request, events: AsyncIterator[Event]) -> web.StreamResponse:
    """Events as one JSON object a line. What fails at once has an HTTP status; later, a line."""
    beginning = asyncio.ensure_future(anext(events, None))
    response = web.StreamResponse(headers=_LINES)
    try:
        await asyncio.wait({beginning}, timeout=_BEGIN_S)
        if beginning.done():
            first = beginning.result()
            if first is not None and first[0] == "exit":
                return web.Response(body=_line(first), headers=_LINES)
        await response.prepare(request)
        try:
            event: Event | None = await beginning
            while event is not None and event[0] != "exit":
                await response.write(_line(event))
                event = await anext(events, None)
            # The client reads no further than the exit. Unless the response's end is in the same packet, its connection is of
            # no more use.
            await response.write_eof(b"" if event is None else _line(event))
        except SandfleetError as error:
            await response.write(json.dumps(_error_event(error)).encode() + b"\n")
    finally:
        while not beginning.done():
            beginning.cancel()
            await asyncio.wait({beginning})
    await response.write_eof()
    return response


def _line(event: Event) -> bytes:
    kind, value = event
    data = {"data": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
    return json.dumps({"event": kind, **data}).encode() + b"\n"


def _error_event(error: SandfleetError) -> dict[str, Any]:
    return {"event": "error", "code": error.code, "status": error.status, "message": error.message}


def invalid(error: ValidationError) -> InvalidRequest:
    """A request that is not as it must be, with the first problem named."""
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"])) or "body"
    return InvalidRequest(f"{field}: {problem['msg']}")
