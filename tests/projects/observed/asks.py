"""Nodes without a model. ``{"raise": text}`` raises it from a node, ``{"lose": text}`` raises it from a task and from a
thread of its own that nobody waits for, ``{"warn": text}`` warns and lets a library log it, ``{"hold": path}`` waits for
the file."""

import asyncio
import logging
import threading
import warnings
from pathlib import Path
from typing import Any, TypedDict

from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    ask: dict[str, Any]
    said: str


async def act(state: State) -> State:
    ask = state.get("ask", {})
    if "hold" in ask:
        while not await asyncio.to_thread(Path(ask["hold"]).exists):
            await asyncio.sleep(0.05)
    if "lose" in ask:
        lost = asyncio.ensure_future(_lose(ask["lose"]))
        await asyncio.wait([lost])
        del lost  # nobody has asked for its error: asyncio logs it
        thread = threading.Thread(target=_raise, args=(ask["lose"],))
        thread.start()
        await asyncio.to_thread(thread.join)
    if "warn" in ask:
        warnings.warn(f"odd {ask['warn']}", stacklevel=1)
        _as_a_library_would(ask["warn"])
    if "raise" in ask:
        raise ValueError(ask["raise"])
    return {"said": "done"}


async def _lose(text: str) -> None:
    _raise(text)


def _raise(text: str) -> None:
    raise KeyError(text)


def _as_a_library_would(text: str) -> None:
    log = logging.getLogger("langchain_core.callbacks.manager")
    made = log.makeRecord(
        log.name, logging.WARNING, logging.__file__, 1, f"Error in callback: {text!r}", (), None
    )
    log.handle(made)


builder = StateGraph(State)
builder.add_node("act", act)
builder.add_edge(START, "act")
builder.add_edge("act", END)
graph = builder.compile()
