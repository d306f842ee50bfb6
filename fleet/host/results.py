"""What an agent may say at the end of an operation, and nothing else. Every byte of it is taken for hostile."""

import contextlib
import json
from typing import Any

from sandfleet.fleet.sandbox_agent import wire

MAX_RESULT_BYTES = 8 * 1024  # of the JSON that ends an operation
# A path of 4,096 bytes and 500 of a text, each byte of which may be escaped in six, and what stands around them.
_MAX_LINE_BYTES = 32 * 1024
CODES = frozenset({
    "bad_path", "bad_pattern", "bad_request", "bad_signal", "busy", "cannot_start", "exists", "io_error", "is_a_directory",
    "killed", "no_command", "no_process", "no_stdin", "no_terminal", "not_a_directory", "not_a_file", "not_empty", "not_found",
    "outside", "permission_denied", "timed_out", "unkillable",
})  # fmt: skip
"""What an agent may call a failure. All other codes are the host's: a sandbox must not speak in its name."""

_Fields = dict[str, type]

_COMMAND: _Fields = {
    "exit_code": int, "signal": int, "timed_out": bool, "killed": bool, "kill_rung": int, "dropped_bytes": int,
    "out_of_memory": bool, "memory_limit_bytes": int, "memory_peak_bytes": int, "duration_ms": int,
}  # fmt: skip
_ENTRY: _Fields = {"kind": str, "size": int, "mode": int, "modified_s": int}
_FOUND: _Fields = {"truncated": bool, "timed_out": bool}
_STATE: _Fields = {
    "process": int, "pid": int, "running": bool, "exit_code": int, "signal": int, "next_offset": int,
}  # fmt: skip
_FIELDS: dict[tuple[int, str], dict[str, type]] = {
    (wire.EXEC, ""): _COMMAND,
    (wire.READ, ""): {"size": int},
    (wire.WRITE, ""): {"size": int},
    (wire.FILES, "stat"): _ENTRY,
    (wire.FILES, "list"): _FOUND,
    (wire.FILES, "glob"): _FOUND,
    (wire.FILES, "grep"): _FOUND,
    (wire.FILES, "mkdir"): {},
    (wire.FILES, "move"): {},
    (wire.FILES, "copy"): {},
    (wire.FILES, "remove"): {},
    (wire.PROCESS, "start"): _STATE,
    (wire.PROCESS, "list"): {"count": int},
    (wire.PROCESS, "read"): {**_STATE, "offset": int, "lost_bytes": int},
    (wire.PROCESS, "write"): {"size": int},
    (wire.PROCESS, "signal"): _STATE,
    (wire.PROCESS, "wait"): _STATE,
    (wire.PROCESS, "kill"): _STATE,
    (wire.PROCESS, "resize"): _STATE,
}
_HIGHEST = {"kill_rung": 2}  # it becomes a label of a metric, of which there must be few
_OPTIONAL = frozenset({"exit_code", "signal", "memory_limit_bytes", "memory_peak_bytes"})
_LINES: dict[tuple[int, str], dict[str, type]] = {
    (wire.FILES, "list"): {"name": str, **_ENTRY},
    (wire.FILES, "glob"): {"name": str, **_ENTRY},
    (wire.FILES, "grep"): {"name": str, "line": int, "text": str},
    (wire.PROCESS, "list"): {**_STATE, "command": str, "age_s": int, "terminal": bool, "stdin": bool},
}
_KINDS = frozenset({"file", "directory", "symlink"})

Asked = tuple[int, str]
"""The kind of an operation, and what it does where its kind does many things."""


class ProtocolError(Exception):
    """The agent broke a rule of the protocol."""


def asked(kind: int, spec: dict[str, Any]) -> Asked:
    """What a request asks for."""
    return kind, str(spec.get("do", ""))


def result(of: Asked, body: bytes) -> dict[str, Any]:
    """The result of an operation, with exactly the fields that it has; ProtocolError if one is missing or wrong."""
    return _checked(_object(body), _FIELDS[of])


def failure(body: bytes) -> dict[str, Any]:
    """``code`` and ``message`` of an operation that the agent could not do."""
    found = _object(body)
    code, message = found.get("code"), found.get("message")
    if not isinstance(code, str) or code not in CODES or not isinstance(message, str):
        raise ProtocolError("a failure without message, or with a code that is no agent's")
    return {"code": code, "message": _storable(message)}


class Lines:
    """Reads lines of JSON off content that comes in pieces. One without an end was cut off, and is left out."""

    def __init__(self, of: Asked) -> None:
        self.found: list[dict[str, Any]] = []
        """One for each line, with exactly the fields that it has."""
        self._fields = _LINES[of]
        self._rest = b""

    def feed(self, content: bytes) -> None:
        """The next piece; ProtocolError if a line is wrong, too long, or one too many."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        if len(self.found) + len(whole) > wire.MAX_ENTRIES:
            raise ProtocolError("more lines than there may be")
        if any(len(line) > _MAX_LINE_BYTES for line in (*whole, self._rest)):
            raise ProtocolError("a line that is too long")
        self.found += [_checked(_parsed(line), self._fields) for line in whole]


def hello(body: bytes) -> tuple[int, str | None]:
    """The newest version of the protocol that both sides speak, and the secret of an agent that was here before.

    ProtocolError if there is no version in common.
    """
    parsed = _parsed(body)
    found = _checked(parsed, {"newest": int, "oldest": int})
    version = min(found["newest"], wire.NEWEST)
    if version < max(found["oldest"], wire.OLDEST):
        raise ProtocolError("no protocol version in common")
    secret = parsed.get("secret")
    return int(version), secret if isinstance(secret, str) and secret.isascii() else None


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_RESULT_BYTES:
        raise ProtocolError("a result that is too long")
    return _parsed(body)


def _parsed(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(body.decode())
        if isinstance(value, dict):
            return value
    raise ProtocolError("a result that is no JSON object")


def _checked(found: dict[str, Any], fields: dict[str, type]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, expected in fields.items():
        value = found.get(name)
        if not (type(value) is expected or (value is None and name in _OPTIONAL)):
            raise ProtocolError(f"a result without {name}")
        if isinstance(value, int) and not 0 <= value <= _HIGHEST.get(name, 2**63 - 1):
            raise ProtocolError(f"a result with {name} out of range")
        checked[name] = _storable(value) if isinstance(value, str) else value
    if "kind" in checked and checked["kind"] not in _KINDS:
        checked["kind"] = "other"
    return checked


def _storable(text: str) -> str:
    """Text without lone surrogates, which are no UTF-8."""
    return text.encode("utf-8", "replace").decode()
