"""Sleeps for ``seconds`` in pieces of ``piece_ms`` (20 by default) and emits ``{"tick": n}`` custom events, n from 0."""

import asyncio
from typing import TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    seconds: float
    piece_ms: float
    ticks: int


async def sleep(state: State) -> State:
    emit = get_stream_writer()
    piece_s = state.get("piece_ms", 20) / 1000
    ticks = max(1, round(state.get("seconds", 1) / piece_s))
    for tick in range(ticks):
        emit({"tick": tick})
        await asyncio.sleep(piece_s)
    return {"ticks": ticks}


builder = StateGraph(State)
builder.add_node("sleep", sleep)
builder.add_edge(START, "sleep")
builder.add_edge("sleep", END)
graph = builder.compile()
