"""A graph with a subgraph ``nested``: the child doubles ``value``, the parent adds one before and after."""

from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    value: int


def add_one(state: State) -> State:
    return {"value": state.get("value", 0) + 1}


def double(state: State) -> State:
    return {"value": state.get("value", 0) * 2}


child = StateGraph(State)
child.add_node("double", double)
child.add_edge(START, "double")
child.add_edge("double", END)

builder = StateGraph(State)
builder.add_node("before", add_one)
builder.add_node("nested", child.compile())
builder.add_node("after", add_one)
builder.add_edge(START, "before")
builder.add_edge("before", "nested")
builder.add_edge("nested", "after")
builder.add_edge("after", END)
graph = builder.compile()
