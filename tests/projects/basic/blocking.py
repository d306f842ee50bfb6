"""A badly written graph: ``time.sleep`` in an async node holds the event loop until the file ``until`` exists. It makes
the file ``until`` + ``.begun`` when it begins."""

import time
from pathlib import Path
from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    until: str
    blocked: bool


async def block(state: State) -> State:
    Path(state["until"] + ".begun").touch()
    while not Path(state["until"]).exists():
        time.sleep(0.05)
    return {"blocked": True}


builder = StateGraph(State)
builder.add_node("block", block)
builder.add_edge(START, "block")
builder.add_edge("block", END)
graph = builder.compile()
