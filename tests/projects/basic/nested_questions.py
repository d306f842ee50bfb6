"""A subgraph that asks two questions in two steps. Before the second it makes the file ``hold`` + ``.held`` and waits until
``hold`` exists. ``answers`` holds what each was answered with."""

import asyncio
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


class State(TypedDict, total=False):
    hold: str
    answers: Annotated[list[Any], add]


def first(state: State) -> State:
    return {"answers": [interrupt("first?")]}


async def second(state: State) -> State:
    Path(state["hold"] + ".held").touch()
    while not Path(state["hold"]).exists():
        await asyncio.sleep(0.05)
    return {"answers": [interrupt("second?")]}


nested = StateGraph(State)
nested.add_node("first", first)
nested.add_node("second", second)
nested.add_edge(START, "first")
nested.add_edge("first", "second")
nested.add_edge("second", END)

builder = StateGraph(State)
builder.add_node("nested", nested.compile())
builder.add_edge(START, "nested")
builder.add_edge("nested", END)
graph = builder.compile()
