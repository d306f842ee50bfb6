"""Asks people: ``ask`` twice, one question after the other, and ``beside`` once, at the same time if ``both``.

Input ``{"both": false, "hold": "/path"}``. After its first answer ``ask`` makes the file ``hold`` + ``.held`` and waits
until ``hold`` exists; without ``hold`` it goes on at once. ``answers`` holds what each question was answered with.
"""

import asyncio
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


class State(TypedDict, total=False):
    both: bool
    hold: str
    answers: Annotated[list[Any], add]


async def ask(state: State) -> State:
    first = interrupt("first?")
    if hold := state.get("hold"):
        Path(hold + ".held").touch()
        while not Path(hold).exists():
            await asyncio.sleep(0.05)
    second = interrupt("second?")
    return {"answers": [first, second]}


def beside(state: State) -> State:
    return {"answers": [interrupt("beside?")]}


def begin(state: State) -> list[str]:
    return ["ask", "beside"] if state.get("both") else ["ask"]


builder = StateGraph(State)
builder.add_node("ask", ask)
builder.add_node("beside", beside)
builder.add_conditional_edges(START, begin, ["ask", "beside"])
builder.add_edge("ask", END)
builder.add_edge("beside", END)
graph = builder.compile()
