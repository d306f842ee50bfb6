"""Answers in OpenAI's wire format: chunks of a stream, whole completions, errors, HTTP framing."""

import secrets
import time
from typing import Any

import orjson

from sandfleet.loadtest.provider.scripts import Conversation, Script, Turn

_ID_SLOT = b"chatcmpl-IDIDIDIDIDIDIDID"
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
STREAM_TAIL = b"0\r\n\r\n"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
}

_cached: dict[tuple[str, Turn, int, bool], list[bytes]] = {}
_CACHED_TEXT_CHARS = 4096
_CACHED_ANSWERS = 256


def http_chunk(data: bytes) -> bytes:
    """``data`` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def response(status: int, body: bytes, headers: str = "") -> bytes:
    """A whole response with a JSON body; ``headers`` are lines that end with CRLF."""
    head = (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Scripted')}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def error_body(status: int, message: str) -> bytes:
    """An error object as OpenAI sends it."""
    kind = (
        "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    )
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})


def _tool_calls(script: Script, turn: Turn, conversation: Conversation) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id or (f"call_{n}" if script.repeat_ids else f"call_{secrets.token_hex(12)}"),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": orjson.dumps(conversation.render(call.args)).decode(),
            },
        }
        for n, call in enumerate(turn.tool_calls, 1)
    ]


def _usage(conversation: Conversation, text: str) -> dict[str, int]:
    """Token counts by the rule of thumb of four characters a token: plausible, not exact."""
    prompt, completion = len(conversation.prompt) // 4 + 1, len(text) // 4 + 1
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def completion(script: Script, turn: Turn, conversation: Conversation, model: str) -> bytes:
    """The body of a whole (not streamed) completion."""
    text = conversation.render(turn.full_text)
    calls = _tool_calls(script, turn, conversation)
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = calls
    return orjson.dumps(
        {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [
                {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"},
            ],
            "usage": _usage(conversation, text),
        }
    )


def stream_events(
    script: Script, turn: Turn, conversation: Conversation, model: str, *, with_usage: bool
) -> list[bytes]:
    """The server-sent events of a streamed completion, without the closing ``[DONE]``.

    Answers that do not depend on the request are kept, so that they cost no JSON work the next time.
    """
    fresh_id = b"chatcmpl-" + secrets.token_hex(8).encode()
    if turn.is_template or len(turn.full_text) > _CACHED_TEXT_CHARS:
        events = _stream_events(script, turn, conversation, model, with_usage)
    else:
        key = (model, turn, turn.chunk_chars or script.chunk_chars, with_usage)
        cached = _cached.get(key)
        if cached is None:
            if len(_cached) >= _CACHED_ANSWERS:
                _cached.clear()
            cached = _cached[key] = _stream_events(script, turn, conversation, model, with_usage)
        events = cached
    return [event.replace(_ID_SLOT, fresh_id) for event in events]


def _stream_events(
    script: Script, turn: Turn, conversation: Conversation, model: str, with_usage: bool
) -> list[bytes]:
    base = {
        "id": _ID_SLOT.decode(),
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return b"data: %b\n\n" % orjson.dumps({**base, "choices": [choice]})

    size = turn.chunk_chars or script.chunk_chars
    text = conversation.render(turn.full_text)
    events = [event({"role": "assistant", "content": text[:size]})]
    events += [event({"content": text[at : at + size]}) for at in range(size, len(text), size)]
    calls = _tool_calls(script, turn, conversation)
    for index, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        opening = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
        events.append(event({"tool_calls": [opening]}))
        events += [
            event({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + size]}}]})
            for at in range(0, len(arguments), size)
        ]
    events.append(event({}, "tool_calls" if calls else "stop"))
    if with_usage:
        usage = {**base, "choices": [], "usage": _usage(conversation, text)}
        events.append(b"data: %b\n\n" % orjson.dumps(usage))
    return events
