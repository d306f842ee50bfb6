"""What the scripted model says: scripts, their turns and faults, and how a request picks one.

A script is a list of turns. The turn that answers a request is the number of assistant messages after its last
human message; past the last turn, the last one repeats. A script is chosen, first match wins, by

1. a JSON object after the marker ``#script:`` in the last human message,
2. the model's name,
3. the default script.

Texts and tool arguments may hold ``{{last_tool}}`` (content of the newest tool message, stripped), ``{{last_stdout}}``
(what follows a line ``stdout:`` in it, or all of it) and ``{{prompt}}`` (the last human message without its markers).
"""

import json
import re
from functools import cached_property, lru_cache
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SCRIPT_MARKER = "#script:"
_ID_MARKER = re.compile(r"#id:(\S+)")
_CACHED_DIRECTIVE_CHARS = 65_536
_DECODER = json.JSONDecoder()


class ScriptError(ValueError):
    """The script is not what this module describes; the message names the field. Answered with 400."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(_Strict):
    """One way to fail, used for ``times`` requests of its turn (null: for every request).

    Exactly one of ``status``, ``drop`` and ``hang``. With ``after_chunks`` above 0 it strikes in mid-stream: a
    status becomes an error event in the stream, a drop ends the connection in the middle of the body.
    """

    status: int | None = Field(None, ge=400, le=599)
    message: str = "scripted failure"
    retry_after_s: float | None = Field(None, ge=0)
    drop: bool = False
    hang: bool = False
    after_chunks: int = Field(0, ge=0)
    times: int | None = Field(1, ge=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.status is not None) + self.drop + self.hang != 1:
            raise ValueError("a fault needs exactly one of status, drop, hang")
        return self


class ToolCall(_Strict):
    """A tool call of the answer. Without an ``id`` it gets a fresh one, as providers do."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    id: str | None = None


class Turn(_Strict):
    """One answer. ``words`` says "w0 w1 w2 …" instead of ``text``, so that a gap or a repetition shows."""

    text: str = ""
    words: int | None = Field(None, ge=1, le=1_000_000)
    tool_calls: tuple[ToolCall, ...] = ()
    faults: tuple[Fault, ...] = ()
    delay_ms: float | None = Field(None, ge=0)
    chunk_delay_ms: float | None = Field(None, ge=0)
    chunk_chars: int | None = Field(None, ge=1)

    @cached_property
    def full_text(self) -> str:
        """The text, with ``words`` spelled out."""
        return self.text if self.words is None else " ".join(f"w{i}" for i in range(self.words))

    @cached_property
    def is_template(self) -> bool:
        """Whether the answer depends on the request, or has tool calls, whose ids are fresh each time."""
        return bool(self.tool_calls) or "{{" in self.text

    def fault(self, nth: int) -> Fault | None:
        """The fault of the ``nth`` request (from 0) for this turn, if any is left."""
        for fault in self.faults:
            if fault.times is None or nth < fault.times:
                return fault
            nth -= fault.times
        return None


class Script(_Strict):
    """Turns, and what they share: ``delay_ms`` before the first chunk, ``chunk_delay_ms`` between chunks,
    ``chunk_chars`` characters per chunk (of text and of tool arguments). ``repeat_ids`` numbers the tool calls of
    every turn ``call_1``, ``call_2``, … anew, as some providers do."""

    turns: tuple[Turn, ...] = Field(min_length=1)
    delay_ms: float = Field(0, ge=0)
    chunk_delay_ms: float = Field(0, ge=0)
    chunk_chars: int = Field(8, ge=1)
    repeat_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _single_turn(cls, value: object) -> object:
        """``{"text": "hi"}`` is short for ``{"turns": [{"text": "hi"}]}``."""
        if isinstance(value, dict) and "turns" not in value:
            shared = {k: value[k] for k in value.keys() & (cls.model_fields.keys() - {"turns"})}
            return {"turns": [{k: v for k, v in value.items() if k not in shared}], **shared}
        return value

    def turn(self, index: int) -> Turn:
        """The turn with this index, or the last one past the end."""
        return self.turns[min(index, len(self.turns) - 1)]


def parse_script(value: object) -> Script:
    """A script from its JSON value. Raises `ScriptError`."""
    try:
        return Script.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "script"
        raise ScriptError(f"{SCRIPT_MARKER} {where}: {first['msg']}") from None


def _parse_directive(text: str) -> tuple[Script, int]:
    try:
        value, end = _DECODER.raw_decode(text.lstrip())
    except ValueError as error:
        raise ScriptError(f"{SCRIPT_MARKER} is not followed by a JSON object: {error}") from None
    return parse_script(value), len(text) - len(text.lstrip()) + end


_parse_short_directive = lru_cache(256)(_parse_directive)


class Conversation:
    """What a request says: its last human message, the turn it is at, its newest tool message, its markers."""

    __slots__ = ("correlation_id", "last_tool", "prompt", "script", "turn_index")

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        """Raises `ScriptError` when a ``#script:`` marker is followed by something else than a script."""
        self.turn_index = 0
        self.last_tool = ""
        self.prompt = ""
        for message in reversed(messages):
            role = message.get("role")
            if role == "assistant":
                self.turn_index += 1
            elif role == "tool" and not self.last_tool:
                self.last_tool = _text(message).strip()
            elif role == "user":
                self.prompt = _text(message)
                break
        self.correlation_id: str | None = None
        self.script: Script | None = None
        if "#" in self.prompt:
            self._read_markers()

    def _read_markers(self) -> None:
        at = self.prompt.find(SCRIPT_MARKER)
        if at >= 0:
            directive = self.prompt[at + len(SCRIPT_MARKER) :]
            short = len(directive) <= _CACHED_DIRECTIVE_CHARS
            self.script, length = (_parse_short_directive if short else _parse_directive)(directive)
            self.prompt = f"{self.prompt[:at]}{directive[length:]}"
        found = _ID_MARKER.search(self.prompt)
        if found:
            self.correlation_id = found[1]
            self.prompt = f"{self.prompt[: found.start()]}{self.prompt[found.end() :]}"
        self.prompt = self.prompt.strip()

    def render(self, value: Any) -> Any:
        """``value`` with the placeholders of every string in it filled in."""
        if isinstance(value, str):
            if "{{" not in value:
                return value
            stdout = self.last_tool.partition("stdout:\n")[2] or self.last_tool
            filled = value.replace("{{last_tool}}", self.last_tool).replace("{{last_stdout}}", stdout)
            return filled.replace("{{prompt}}", self.prompt)
        if isinstance(value, dict):
            return {key: self.render(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.render(item) for item in value]
        return value


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return ""
