"""Raises ``ValueError`` with the ``message`` of its input, after one step that succeeds; ``kind`` "exit" calls sys.exit."""

import sys
from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    message: str
    kind: str
    reached: bool


def first(state: State) -> State:
    return {"reached": True}


def fail(state: State) -> State:
    if state.get("kind") == "exit":
        sys.exit(state.get("message"))
    raise ValueError(state.get("message", "failed as asked"))


builder = StateGraph(State)
builder.add_node("first", first)
builder.add_node("fail", fail)
builder.add_edge(START, "first")
builder.add_edge("first", "fail")
builder.add_edge("fail", END)
graph = builder.compile()
