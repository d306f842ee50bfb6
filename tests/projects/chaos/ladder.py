"""A ladder of up to 20 rungs, each a node of its own: a rung that is lost, repeated or out of order shows in the state.

Input ``{"salt", "steps", "delay_ms", "fail_at", "ask_at", "die_at", "fan_at", "note_at", "renote_at"}``; all but the first
two may be null. Each rung adds ``"salt:step"`` to ``log`` and folds it into ``digest``, both of which outlive the run: the
next run on the thread climbs from its first rung again and adds to them. Then a rung may, by its number:

- ``fail_at``: raise before it adds anything;
- ``die_at``: kill the executor, as poison does;
- ``ask_at``: interrupt, and add the answer: ``"salt:step:answer"``;
- ``note_at``: call the tool `note`, whose effect is a line in a file outside, and add what came of it:
  ``"salt:step:noted"`` or ``"salt:step:orphaned"``. ``renote_at`` calls `renote`, which may be repeated;
- ``fan_at``: send three leaves off side by side before the next rung; they add up in ``leaves``.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send, interrupt

from sandfleet.fleet.tools import CallOrphaned, idempotent

RUNGS = 20
LEAVES = 3
EFFECTS = "CHAOS_EFFECTS"
"""Names the file that the tools write to, a line ``salt:step`` per effect."""

_MODULUS = 1_000_000_007


class State(TypedDict, total=False):
    salt: str
    steps: int
    delay_ms: float
    fail_at: int | None
    ask_at: int | None
    die_at: int | None
    fan_at: int | None
    note_at: int | None
    renote_at: int | None
    log: Annotated[list[str], add]
    leaves: Annotated[int, add]
    digest: int


def fold(digest: int, entry: str) -> int:
    """The digest after one more entry: depends on all entries and their order."""
    return (digest * 31 + sum(entry.encode())) % _MODULUS


def digest_of(log: list[str]) -> int:
    """What the digest must be when the log is this."""
    digest = 0
    for entry in log:
        digest = fold(digest, entry)
    return digest


def _write(line: str) -> None:
    with Path(os.environ[EFFECTS]).open("a") as effects:
        effects.write(line + "\n")  # one write: appended whole or not at all


@tool
async def note(line: str) -> str:
    """Add a line to the file."""
    _write(line)
    return "noted"


@idempotent
@tool
async def renote(line: str) -> str:
    """Add a line to the file; it may stand there several times."""
    _write(line)
    return "noted"


def _rung(step: int) -> Callable[[State], Coroutine[Any, Any, State]]:
    async def climb(state: State) -> State:
        await asyncio.sleep((state.get("delay_ms") or 0) / 1000)
        entry = f"{state['salt']}:{step}"
        if step == state.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == state.get("fail_at"):
            raise RuntimeError(f"rung {step} breaks as asked")
        if step == state.get("ask_at"):
            entry += f":{interrupt({'rung': step})}"
        if step == state.get("renote_at"):
            entry += f":{await renote.ainvoke({'line': entry})}"
        elif step == state.get("note_at"):
            try:
                entry += f":{await note.ainvoke({'line': entry})}"
            except CallOrphaned:
                entry += ":orphaned"
        return {"log": [entry], "digest": fold(state.get("digest", 0), entry)}

    return climb


def _after(step: int) -> Callable[[State], Any]:
    def go_on(state: State) -> Any:
        if step == state.get("fan_at"):
            return [Send("leaf", {**state, "leaf": (step, n)}) for n in range(LEAVES)]
        return _next(state, step)

    return go_on


def _next(state: State, step: int) -> str:
    return f"rung_{step + 1}" if step < min(state["steps"], RUNGS) else END


async def leaf(state: Any) -> State:
    step, number = state["leaf"]
    await asyncio.sleep((state.get("delay_ms") or 0) * number / 1000)
    return {"leaves": step}


def _after_leaf(state: State) -> str:
    return _next(state, state["fan_at"] or 0)


builder = StateGraph(State)
builder.add_edge(START, "rung_1")
for number in range(1, RUNGS + 1):
    builder.add_node(f"rung_{number}", _rung(number))
    builder.add_conditional_edges(f"rung_{number}", _after(number))
builder.add_node("leaf", leaf)
builder.add_conditional_edges("leaf", _after_leaf)
graph = builder.compile()
