"""Runs tool calls in the sandbox without a model.

Input ``{"calls": [{"name": "execute", "args": {"command": "echo hi"}}, …]}`` (or ``{"commands": ["echo hi", …]}`` for
`execute` alone). The calls are made one after the other as a model would make them, each in an AI message of its own
with the id ``call_1``; their results are in ``results``, in order.
"""

from operator import add
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, ToolCall, ToolMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from sandfleet.fleet.sandbox.tools import sandbox_tools


class State(TypedDict, total=False):
    commands: list[str]
    calls: list[dict[str, Any]]
    messages: Annotated[list[AnyMessage], add_messages]
    results: Annotated[list[Any], add]


def _calls(state: State) -> list[dict[str, Any]]:
    executes = [{"name": "execute", "args": {"command": command}} for command in state.get("commands", [])]
    return executes + state.get("calls", [])


def plan(state: State) -> State:
    call = _calls(state)[len(state.get("results", []))]
    tool_call = ToolCall(name=call["name"], args=call["args"], id="call_1", type="tool_call")
    return {"messages": [AIMessage("", tool_calls=[tool_call])]}


def collect(state: State) -> State:
    last = state["messages"][-1]
    return {"results": [last.content if isinstance(last, ToolMessage) else None]}


def go_on(state: State) -> str:
    return "plan" if len(state.get("results", [])) < len(_calls(state)) else END


builder = StateGraph(State)
builder.add_node("plan", plan)
builder.add_node("tools", ToolNode(sandbox_tools))
builder.add_node("collect", collect)
builder.add_conditional_edges(START, go_on, ["plan", END])
builder.add_edge("plan", "tools")
builder.add_edge("tools", "collect")
builder.add_conditional_edges("collect", go_on, ["plan", END])
graph = builder.compile()
