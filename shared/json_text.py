"""JSON in both directions: whatever a graph emits can be written; a request is read only if it can be kept exactly."""

import base64
import dataclasses
import datetime
import decimal
import enum
import re
import reprlib
import uuid
import zoneinfo
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import orjson

from sandfleet.shared.errors import BadRequest, InvalidRequest

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_MAX_DEPTH = 200
_MAX_TEXT = 1000
_UNSIGNED_64 = 2**64
_SIGNED_64 = -(2**63)

_repr = reprlib.Repr()
_repr.maxlevel = 4
_repr.maxother = _repr.maxstring = _repr.maxlong = _MAX_TEXT


def to_json(value: object) -> bytes:
    """``value`` as JSON in UTF-8; never raises.

    LangChain messages and pydantic models are dumped with all fields, dataclasses and named tuples become objects,
    exceptions ``{"error": type, "message": text}``, sets lists, bytes base64, times ISO 8601, durations seconds. NaN and
    infinities become null, lone surrogates U+FFFD, integers beyond 64 bits floats, keys text. What nests deeper than
    200 levels or contains itself is cut off there and, like unknown objects, written as a text of at most 1,000 characters.
    U+0000 is kept, as an escape.
    """
    try:
        return orjson.dumps(value, _simpler, _OPTIONS)
    except Exception:
        return _mended_json(value)


def _mended_json(value: object) -> bytes:
    try:
        return orjson.dumps(_plain(value, 0, set()))
    except Exception:  # the value raises while it is looked at, or this thread's stack is used up
        return orjson.dumps(bounded_text(value))


def _simpler(value: Any) -> Any:
    """What stands for an object that orjson does not know. May raise what the object raises."""
    if isinstance(value, type):
        return bounded_text(value)
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if isinstance(value, tuple) and callable(as_dict := getattr(value, "_asdict", None)):
        return as_dict()
    if isinstance(value, BaseException):
        return {"error": type(value).__name__, "message": str(value)}
    if isinstance(value, (AbstractSet, deque, tuple)):
        return list(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timezone, zoneinfo.ZoneInfo)):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() and abs(value) < 2**53 else float(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, Mapping):
        return dict(value)
    if callable(to_list := getattr(value, "tolist", None)):  # arrays that orjson refuses
        return to_list()
    if callable(as_dict := getattr(value, "dict", None)):  # pydantic 1
        return as_dict()
    return bounded_text(value)


def _plain(value: Any, depth: int, path: set[int]) -> Any:
    """``value`` as what JSON has, with everything mended that orjson refuses."""
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth + 1, path) if depth < _MAX_DEPTH else bounded_text(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return _mended(value)
    if isinstance(value, int):
        return _number(value)
    if depth >= _MAX_DEPTH or id(value) in path:
        return bounded_text(value)
    path.add(id(value))
    try:
        if isinstance(value, Mapping):
            return {_key(k): _plain(v, depth + 1, path) for k, v in value.items()}
        if isinstance(value, list):
            return [_plain(v, depth + 1, path) for v in value]
        if isinstance(value, uuid.UUID):
            return str(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if not f.name.startswith("_")]
            return {_mended(f): _plain(getattr(value, f, None), depth + 1, path) for f in fields}
        try:
            simpler = _simpler(value)
        except Exception:
            return bounded_text(value)
        return _plain(simpler, depth + 1, path)
    finally:
        path.discard(id(value))


def _number(value: int) -> int | float | str:
    if _SIGNED_64 <= value < _UNSIGNED_64:
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return bounded_text(value)


def _key(key: object) -> str:
    """The same text that orjson makes of this key, or else the key's own text."""
    if isinstance(key, str) and not isinstance(key, enum.Enum):
        return _mended(key)
    try:
        return str(next(iter(orjson.loads(orjson.dumps({key: None}, option=_OPTIONS)))))
    except Exception:
        return bounded_text(key)


def _mended(text: str) -> str:
    """Surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return str(text)


def bounded_text(value: object) -> str:
    """A text of at most 1,000 characters for any object; never raises."""
    try:
        return _mended(_repr.repr(value))[:_MAX_TEXT]
    except Exception:
        return f"<{_mended(type(value).__name__)}>"


def parse_json(body: bytes, max_depth: int) -> Any:
    """A request's JSON. Integers beyond 64 bits become floats.

    Raises InvalidRequest for what is not JSON or cannot be kept (NaN, 1e999, lone surrogates, invalid UTF-8), saying
    where; BadRequest for more than ``max_depth`` levels of objects and lists.
    """
    too_deep = BadRequest(f"The body nests deeper than {max_depth} levels.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if "depth limit" in error.msg or "recursion" in error.msg.lower():
            raise too_deep from None
        raise InvalidRequest(f"The body is not valid JSON: {_where(body, error)}.") from None
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        if depth > max_depth:
            raise too_deep
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return value


def _where(body: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as invalid:
        return f"byte {invalid.start} is not UTF-8"
    return str(error)


def contains(document: Any, wanted: Any) -> bool:
    """Whether ``document`` contains ``wanted`` as PostgreSQL's ``@>`` means it: objects by key, lists by element."""
    if isinstance(wanted, Mapping):
        return isinstance(document, Mapping) and all(
            key in document and contains(document[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(document, list) and all(
            any(contains(element, each) for element in document) for each in wanted
        )
    if isinstance(wanted, bool) or isinstance(document, bool):
        return document is wanted
    return bool(document == wanted)
