"""The provider's HTTP server: one asyncio protocol per connection, answers planned ahead and written on timers.

| request | answer |
| --- | --- |
| ``POST /v1/chat/completions`` | what the script says, streamed or whole |
| ``GET /v1/models`` | the models that have a script |
| ``GET /_requests?id=…`` | ``{"requests": […]}``: arrivals, all or those of one correlation id |
| ``POST /_reset`` | forgets arrivals and fault counters |

The correlation id of a request is its header ``x-correlation-id`` or what follows ``#id:`` in its last human message.
Requests on one connection are answered one after the other; pipelining is not supported.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import parse_qs

import httptools
import orjson

from sandfleet.loadtest.provider import wire
from sandfleet.loadtest.provider.arrivals import Arrival, Arrivals
from sandfleet.loadtest.provider.builtin import MODELS, builtin_script
from sandfleet.loadtest.provider.scripts import Conversation, Fault, Script, ScriptError, Turn

_MAX_BODY_BYTES = 16 * 1024 * 1024


class Provider:
    """What all connections share: the scripts by model name, and the record of arrivals."""

    def __init__(self, scripts: Mapping[str, Script] | None = None) -> None:
        """``scripts`` come before the built-in ones; the name ``default`` answers for unknown models."""
        self.scripts = dict(scripts or {})
        self.arrivals = Arrivals()
        self.connections: set[Connection] = set()

    def script(self, model: str, conversation: Conversation) -> Script:
        """The script of a request."""
        if conversation.script is not None:
            return conversation.script
        named = self.scripts.get(model)
        if named is None and model not in MODELS:
            named = self.scripts.get("default")
        return named or builtin_script(model, conversation)

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Start to listen; port 0 takes a free one."""
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self), host, port, backlog=1024
        )


class Connection(asyncio.Protocol):
    """One client connection. Also the callbacks that httptools calls while it parses."""

    __slots__ = (
        "_arrival",
        "_body",
        "_body_bytes",
        "_end",
        "_header_id",
        "_parser",
        "_plan",
        "_provider",
        "_started_s",
        "_timer",
        "_traceparent",
        "_transport",
        "_url",
    )

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._arrival: Arrival | None = None
        self._plan: list[tuple[float, bytes]] = []
        self._end = "answered"

    # --- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._provider.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._provider.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._arrival is not None and self._arrival.outcome in ("open", "hanging"):
            self._arrival.outcome = "client_closed"

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def close(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # --- httptools -------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._started_s = time.monotonic()
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._header_id: str | None = None
        self._traceparent: str | None = None

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == 16 and name.lower() == b"x-correlation-id":
            self._header_id = value.decode("latin-1")
        elif len(name) == 11 and name.lower() == b"traceparent":
            self._traceparent = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes <= _MAX_BODY_BYTES:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._arrival is not None and self._arrival.outcome == "open":
            self._transport.close()
            return
        path, _, query = self._url.decode("latin-1").partition("?")
        method = self._parser.get_method()
        if self._body_bytes > _MAX_BODY_BYTES:
            self._refuse(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
        elif path == "/v1/chat/completions" and method == b"POST":
            self._complete(b"".join(self._body))
        elif path == "/v1/models" and method == b"GET":
            names = [*MODELS, *self._provider.scripts]
            self._json({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        elif path == "/_requests" and method == b"GET":
            self._json({"requests": self._provider.arrivals.listed(parse_qs(query).get("id", [None])[0])})
        elif path == "/_reset" and method == b"POST":
            self._provider.arrivals.reset()
            self._json({})
        else:
            self._refuse(404, f"no route for {method.decode()} {path}")

    # --- answers ---------------------------------------------------------------------------------------------

    def _json(self, value: object) -> None:
        self._transport.write(wire.response(200, orjson.dumps(value)))

    def _refuse(self, status: int, message: str) -> None:
        self._transport.write(wire.response(status, wire.error_body(status, message)))

    def _complete(self, body: bytes) -> None:
        try:
            request: dict[str, Any] = orjson.loads(body)
            model = request["model"]
            conversation = Conversation(request["messages"])
            script = self._provider.script(model, conversation)
        except ScriptError as error:
            self._refuse(400, str(error))
            return
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            self._refuse(400, "the body is not a chat completion request with model and messages")
            return
        stream = bool(request.get("stream"))
        turn = script.turn(conversation.turn_index)
        correlation_id = self._header_id or conversation.correlation_id
        asked = (model, correlation_id or conversation.prompt, conversation.turn_index)
        nth = self._provider.arrivals.nth(asked) if turn.faults else 0
        self._arrival = self._provider.arrivals.record(
            self._started_s,
            id=correlation_id,
            model=model,
            turn=conversation.turn_index,
            nth=nth,
            stream=stream,
        )
        self._arrival.traceparent = self._traceparent
        fault = turn.fault(nth)
        if fault is None and turn.faults:
            self._provider.arrivals.succeeded(asked)
        if stream:
            with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
            events = wire.stream_events(script, turn, conversation, model, with_usage=with_usage)
            self._stream(script, turn, fault, events)
        else:
            self._answer_whole(script, turn, fault, wire.completion(script, turn, conversation, model))

    def _stream(self, script: Script, turn: Turn, fault: Fault | None, events: list[bytes]) -> None:
        first_s = (script.delay_ms if turn.delay_ms is None else turn.delay_ms) / 1000
        between_s = (script.chunk_delay_ms if turn.chunk_delay_ms is None else turn.chunk_delay_ms) / 1000
        self._end = "answered"
        if fault is None:
            events.append(wire.DONE)
        elif fault.after_chunks == 0:
            self._strike(fault, first_s)
            return
        else:
            del events[fault.after_chunks :]
            self._end = _ending(fault)
            if fault.status is not None:
                events.append(b"data: %b\n\n" % wire.error_body(fault.status, fault.message))
        tail = b"" if self._end in ("dropped", "hanging") else wire.STREAM_TAIL
        if between_s == 0:
            whole = wire.STREAM_HEAD + wire.http_chunk(b"".join(events)) + tail
            self._run([(first_s, whole)])
            return
        plan = [(between_s, wire.http_chunk(event)) for event in events]
        plan[0] = (first_s, wire.STREAM_HEAD + plan[0][1])
        plan.append((0.0, tail))
        self._run(plan)

    def _answer_whole(self, script: Script, turn: Turn, fault: Fault | None, body: bytes) -> None:
        first_s = (script.delay_ms if turn.delay_ms is None else turn.delay_ms) / 1000
        if fault is not None:
            self._strike(fault, first_s)
            return
        self._end = "answered"
        self._run([(first_s, wire.response(200, body))])

    def _strike(self, fault: Fault, after_s: float) -> None:
        """A fault before the first byte of an answer."""
        self._end = _ending(fault)
        data = b""
        if fault.status is not None:
            headers = ""
            if fault.retry_after_s is not None:
                headers = f"retry-after: {fault.retry_after_s:g}\r\n"
            data = wire.response(fault.status, wire.error_body(fault.status, fault.message), headers)
        self._run([(after_s, data)])

    def _run(self, plan: list[tuple[float, bytes]]) -> None:
        """Write a plan of (pause before it in seconds, bytes), then end as ``self._end`` says."""
        plan.reverse()
        self._plan = plan
        self._advance(waited=False)

    def _advance(self, waited: bool = True) -> None:
        plan = self._plan
        while plan:
            pause_s, data = plan[-1]
            if pause_s > 0 and not waited:
                self._timer = asyncio.get_running_loop().call_later(pause_s, self._advance)
                return
            waited = False
            plan.pop()
            if data:
                self._transport.write(data)
        self._timer = None
        if self._arrival is not None:
            self._arrival.outcome = self._end
        if self._end == "dropped":
            self._transport.close()


def _ending(fault: Fault) -> str:
    if fault.status is not None:
        return f"status {fault.status}"
    return "dropped" if fault.drop else "hanging"
