"""Does not stop when it is cancelled: swallows ``times`` cancellations, or all of them until the file ``until`` exists.

``padding`` is state that is large, if asked for.
"""

import asyncio
from pathlib import Path
from typing import TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    times: int
    until: str
    swallowed: int
    padding: str


async def resist(state: State) -> State:
    swallowed = 0
    while not Path(state["until"]).exists():
        try:
            await asyncio.sleep(0.05)
        except BaseException:
            swallowed += 1
            if swallowed > state.get("times", 1_000_000):
                raise
    return {"swallowed": swallowed}


builder = StateGraph(State)
builder.add_node("resist", resist)
builder.add_edge(START, "resist")
builder.add_edge("resist", END)
graph = builder.compile()
