"""Adds ``kept`` to a file of its sandbox, waits until the file ``until`` of the machine is there, is interrupted, and
reads the sandbox's file: ``found`` has what it held, or what went wrong."""

import asyncio
from pathlib import Path
from typing import TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from sandfleet.fleet.sandbox.run_sandbox import running_sandbox


class State(TypedDict, total=False):
    until: str
    written: bool
    found: str


async def write(state: State) -> State:
    await running_sandbox().exec("echo kept >> note")
    return {"written": True}


async def wait(state: State) -> State:
    while not Path(state["until"]).exists():
        await asyncio.sleep(0.05)
    return {}


def ask(state: State) -> State:
    interrupt("Go on?")
    return {}


async def look(state: State) -> State:
    ran = await running_sandbox().exec("cat note")
    return {"found": (ran.stdout + ran.stderr).decode()}


builder = StateGraph(State)
for node in (write, wait, ask, look):
    builder.add_node(node)
builder.add_edge(START, "write")
builder.add_edge("write", "wait")
builder.add_edge("wait", "ask")
builder.add_edge("ask", "look")
builder.add_edge("look", END)
graph = builder.compile()
