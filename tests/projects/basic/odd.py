"""Puts a value that PostgreSQL, JSON or UTF-8 cannot hold as it is into its state.

Input ``{"kind": "nul" | "surrogate" | "nan" | "huge_int" | "bytes" | "deep" | "all"}``. The value is in the state as
``odd``, goes out as a custom event, and a second node checks that it came through the checkpoint unchanged (``intact``).
"""

import math
from typing import Any, TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph

DEPTH = 400


def _deep() -> Any:
    value: Any = "bottom"
    for _ in range(DEPTH):
        value = [value]
    return value


ODD: dict[str, Any] = {
    "nul": "before\x00after",
    "surrogate": "before\ud800after",
    "nan": math.nan,
    "huge_int": 2**200,
    "bytes": b"\x00\xff\x80",
    "deep": _deep(),
}


class State(TypedDict, total=False):
    kind: str
    odd: Any
    intact: bool


def _value(kind: str) -> Any:
    return dict(ODD) if kind == "all" else ODD[kind]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(_same(left[k], right[k]) for k in left)
        )
    if isinstance(left, float):
        return isinstance(right, float) and (left == right or (math.isnan(left) and math.isnan(right)))
    return type(left) is type(right) and bool(left == right)


def produce(state: State) -> State:
    value = _value(state.get("kind", "all"))
    get_stream_writer()({"odd": value})
    return {"odd": value}


def check(state: State) -> State:
    return {"intact": _same(_value(state.get("kind", "all")), state.get("odd"))}


builder = StateGraph(State)
builder.add_node("produce", produce)
builder.add_node("check", check)
builder.add_edge(START, "produce")
builder.add_edge("produce", "check")
builder.add_edge("check", END)
graph = builder.compile()
