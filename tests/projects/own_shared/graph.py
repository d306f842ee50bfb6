"""Uses the project's own ``shared`` and ``functions``. Input ``{"name": "…"}``, result ``said`` and ``shouted``."""

from typing import TypedDict

from functions import shout
from langgraph.graph import END, START, StateGraph
from shared.greeting import greeting


class State(TypedDict, total=False):
    name: str
    said: str
    shouted: str


def greet(state: State) -> State:
    name = state.get("name", "nobody")
    return {"said": greeting(name), "shouted": shout(name)}


builder = StateGraph(State)
builder.add_node("greet", greet)
builder.add_edge(START, "greet")
builder.add_edge("greet", END)
graph = builder.compile()
