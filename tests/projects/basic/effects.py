"""Tools with a side effect outside: each call appends its line to a file.

Input ``{"path": "/…", "calls": [[{"tool": "append", "line": "a"}, …], …]}``: a list of calls per step. A step's calls are
in one AI message, and all of them have the tool call id ``call_1``. ``results`` holds what each call gave, in order, as
``[status, content]``. Tools: ``append`` (async), ``append_in_thread`` (a plain function), ``append_again`` (declared
idempotent), ``append_if_approved`` (interrupts first), ``fail`` (appends, then raises ValueError),
``wait`` (appends, then waits for ever), ``command`` (appends, and changes the state by a ``Command``).
"""

import asyncio
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, ToolCall, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.types import Command, interrupt

from sandfleet.fleet.tools import current_call, idempotent


class State(TypedDict, total=False):
    path: str
    calls: list[list[dict[str, Any]]]
    step: int
    messages: Annotated[list[AnyMessage], add_messages]
    results: Annotated[list[Any], add]


def _append(path: str, line: str) -> str:
    with Path(path).open("a") as file:
        file.write(line + "\n")
    return f"appended {line}"


@tool
async def append(line: str, path: Annotated[str, InjectedState("path")]) -> str:
    """Append a line."""
    return _append(path, line)


@tool
def append_in_thread(line: str, runtime: ToolRuntime) -> str:
    """Append a line."""
    return _append(runtime.state["path"], line)


@idempotent
@tool
async def append_again(line: str, path: Annotated[str, InjectedState("path")]) -> str:
    """Append a line with the call's key."""
    return _append(path, f"{line} {current_call().idempotency_key}")


@tool
async def append_if_approved(line: str, path: Annotated[str, InjectedState("path")]) -> str:
    """Append a line if a person agrees."""
    return _append(path, line) if interrupt({"append": line}) else "refused"


@tool
async def fail(line: str, path: Annotated[str, InjectedState("path")]) -> str:
    """Append a line and fail."""
    _append(path, line)
    raise ValueError(f"no more after {line}")


@tool
async def wait(line: str, path: Annotated[str, InjectedState("path")]) -> str:
    """Append a line and never come back."""
    _append(path, line)
    await asyncio.Event().wait()
    return "never"


@tool
async def command(line: str, runtime: ToolRuntime) -> Command[Any]:
    """Append a line and change the state."""
    shown = _append(runtime.state["path"], line)
    message = ToolMessage(shown, tool_call_id=runtime.tool_call_id)
    return Command(update={"messages": [message], "results": [["command", line]]})


def plan(state: State) -> State:
    step = state.get("step", 0)
    calls = [
        ToolCall(name=each["tool"], args={"line": each["line"]}, id="call_1", type="tool_call")
        for each in state["calls"][step]
    ]
    return {"messages": [AIMessage("", tool_calls=calls)], "step": step + 1}


def collect(state: State) -> State:
    answers: list[ToolMessage] = []
    for message in reversed(state["messages"]):
        if not isinstance(message, ToolMessage):
            break
        answers.insert(0, message)
    return {"results": [[answer.status, answer.content] for answer in answers]}


def go_on(state: State) -> str:
    return "plan" if state.get("step", 0) < len(state["calls"]) else END


builder = StateGraph(State)
builder.add_node("plan", plan)
builder.add_node(
    "tools",
    ToolNode(
        [append, append_in_thread, append_again, append_if_approved, fail, wait, command],
        handle_tool_errors=(ValueError,),
    ),
)
builder.add_node("collect", collect)
builder.add_edge(START, "plan")
builder.add_edge("plan", "tools")
builder.add_edge("tools", "collect")
builder.add_conditional_edges("collect", go_on, ["plan", END])
graph = builder.compile()
