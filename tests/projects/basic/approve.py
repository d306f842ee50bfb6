"""Asks for approval by an interrupt, and returns what it was resumed with.

Input ``{"question": "…"}``; after the resume the state holds ``answer``, and ``asked`` counts runs of the node before
the interrupt, which must be 1.
"""

from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


class State(TypedDict, total=False):
    question: str
    asked: int
    answer: Any


def prepare(state: State) -> State:
    return {"asked": state.get("asked", 0) + 1}


def ask(state: State) -> State:
    return {"answer": interrupt({"question": state.get("question", "Go on?")})}


builder = StateGraph(State)
builder.add_node("prepare", prepare)
builder.add_node("ask", ask)
builder.add_edge(START, "prepare")
builder.add_edge("prepare", "ask")
builder.add_edge("ask", END)
graph = builder.compile()
