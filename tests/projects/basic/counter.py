"""``steps`` steps, each of which must run exactly once for the ``digest`` to come out right.

Input ``{"steps": 5, "delay_ms": 0, "fail_at": null}``. Every step adds its number to ``done`` and folds it into
``digest``; ``expected_digest(steps)`` is what the result must be. ``fail_at`` raises in that step (from 1), and
``wait_at`` waits in it until the file ``until`` exists.
"""

import asyncio
from operator import add
from pathlib import Path
from typing import Annotated, TypedDict

from langgraph.graph import END, START, StateGraph

_MODULUS = 1_000_000_007


class State(TypedDict, total=False):
    steps: int
    delay_ms: float
    fail_at: int | None
    wait_at: int | None
    until: str
    done: Annotated[list[int], add]
    digest: int


def fold(digest: int, step: int) -> int:
    """One step of the digest: depends on the order, and on each step having been taken once."""
    return (digest * 31 + step) % _MODULUS


def expected_digest(steps: int) -> int:
    """The digest after ``steps`` steps, each run once and in order."""
    digest = 0
    for step in range(1, steps + 1):
        digest = fold(digest, step)
    return digest


async def count(state: State) -> State:
    await asyncio.sleep(state.get("delay_ms", 0) / 1000)
    step = len(state.get("done", [])) + 1
    while step == state.get("wait_at") and not Path(state["until"]).exists():
        await asyncio.sleep(0.05)
    if step == state.get("fail_at"):
        raise RuntimeError(f"step {step} fails as asked")
    return {"done": [step], "digest": fold(state.get("digest", 0), step)}


def go_on(state: State) -> str:
    return "count" if len(state["done"]) < state.get("steps", 5) else END


builder = StateGraph(State)
builder.add_node("count", count)
builder.add_edge(START, "count")
builder.add_conditional_edges("count", go_on, ["count", END])
graph = builder.compile()
