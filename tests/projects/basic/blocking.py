"""A badly written graph: ``time.sleep`` in an async node holds the event loop for ``seconds``."""

import time
from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    seconds: float
    blocked: bool


async def block(state: State) -> State:
    time.sleep(state.get("seconds", 1))
    return {"blocked": True}


builder = StateGraph(State)
builder.add_node("block", block)
builder.add_edge(START, "block")
builder.add_edge("block", END)
graph = builder.compile()
