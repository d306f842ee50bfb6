"""LangGraph's serializer, which must not end a run because of a value that MessagePack has no form for."""

from collections.abc import Mapping
from typing import Any

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from sandfleet.shared.json_text import bounded_text

MAX_DEPTH = 200
"""Levels that are kept of a value that nests too deeply; MessagePack's encoder takes 254, with what is around the value."""


class TolerantSerializer(JsonPlusSerializer):
    """Writes what ``JsonPlusSerializer`` writes. Where that refuses a value, integers beyond 64 bits become floats, and
    what nests deeper than 200 levels or contains itself becomes a text of at most 1,000 characters, as in the API's JSON.

    Raises TypeError for objects of types that cannot be serialized, as LangGraph does.
    """

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        try:
            return super().dumps_typed(obj)
        except (TypeError, ValueError, RecursionError):
            return super().dumps_typed(_mended(obj, 0, set()))


def _mended(value: Any, depth: int, path: set[int]) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return _number(value)
    if not isinstance(value, (dict, list, tuple, BaseModel)):
        return value
    if depth >= MAX_DEPTH or id(value) in path:
        return bounded_text(value)
    path.add(id(value))
    try:
        if isinstance(value, BaseModel):
            fields = {name: _mended(each, depth + 1, path) for name, each in value.__dict__.items()}
            return value.model_copy(update=fields)
        if isinstance(value, Mapping):
            return {_mended(k, depth, path): _mended(each, depth + 1, path) for k, each in value.items()}
        items = [_mended(each, depth + 1, path) for each in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    finally:
        path.discard(id(value))


def _number(value: int) -> int | float | str:
    if -(2**63) <= value < 2**64:
        return value
    try:
        return float(value)
    except OverflowError:
        return bounded_text(value)
