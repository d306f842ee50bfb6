"""What the API tells about a graph without having it: its JSON schemas and its drawing."""

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

_DEEPEST_XRAY = 4


def schemas(graph: Pregel[Any, Any, Any, Any]) -> dict[str, Any]:
    """Input, output, state, config and context schema as JSON Schema; null where the graph has none."""
    return {
        "input_schema": _schema(graph.get_input_jsonschema),
        "output_schema": _schema(graph.get_output_jsonschema),
        "state_schema": _schema(lambda: graph.get_output_schema().model_json_schema())
        if _has_state(graph)
        else None,
        "config_schema": _schema(lambda: graph.config_schema().model_json_schema()),
        "context_schema": _schema(graph.get_context_jsonschema),
    }


def _has_state(graph: Pregel[Any, Any, Any, Any]) -> bool:
    return bool(graph.channels)


def _schema(make: Any) -> dict[str, Any] | None:
    """A schema, or None for a type that JSON Schema cannot express (a graph may hold any Python object)."""
    try:
        made = make()
    except Exception:
        return None
    return made if isinstance(made, dict) else None


async def drawings(graph: Pregel[Any, Any, Any, Any]) -> dict[str, Any]:
    """``{depth: {"nodes", "edges"}}`` for each depth of expanded subgraphs, until deeper changes nothing."""
    result: dict[str, Any] = {}
    for depth in range(_DEEPEST_XRAY + 1):
        config: RunnableConfig = {}
        drawing = (await graph.aget_graph(config, xray=depth)).to_json()
        if depth and drawing == result[str(depth - 1)]:
            break
        result[str(depth)] = drawing
    return result
