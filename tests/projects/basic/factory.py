"""A factory that takes the run's config: the graph it makes greets the ``name`` of that config and no other.

Result: ``greeting`` is ``Hello <name>``, and ``builds`` counts how often the factory was called in this process.
"""

from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

_builds = 0


class State(TypedDict, total=False):
    greeting: str
    builds: int


def make_graph(config: RunnableConfig) -> CompiledStateGraph[State, Any, State, State]:
    global _builds
    _builds += 1
    name = config.get("configurable", {}).get("name", "nobody")
    builds = _builds

    def greet(state: State) -> State:
        return {"greeting": f"Hello {name}", "builds": builds}

    builder = StateGraph(State)
    builder.add_node("greet", greet)
    builder.add_edge(START, "greet")
    builder.add_edge("greet", END)
    return builder.compile()
