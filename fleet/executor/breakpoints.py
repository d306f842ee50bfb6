"""Breakpoints, where a graph stops before or after a node until another run goes on, and attempts that begin at one.

LangGraph takes whoever goes on from a checkpoint without an input for somebody who was asked and lets the graph pass, and with
it all graphs in its nodes. An attempt that begins where an earlier one of its run was lost was not asked: what needs approval
would be done without. Graphs within nodes are those that LangGraph finds there, as for a state with its subgraphs.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.constants import TAG_HIDDEN
from langgraph.pregel import Pregel
from langgraph.types import All, StateSnapshot

from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.shared.store.claims import ClaimedRun

_Graph = Pregel[Any, Any, Any, Any]
_Where = All | Sequence[str]

_OF_ITS_STEPS = ("input", "loop")  # other checkpoints are begun with, past a breakpoint that may be there


async def reached(run: ClaimedRun, saver: FencedSaver, graph: _Graph, config: RunnableConfig) -> set[str]:
    """Namespaces of the graphs that an earlier attempt of the run has brought to a breakpoint, each the outermost there: ``""``
    is the run's own graph, so that there is nothing left to do but to end. Raises as LangGraph does when it reads a thread's
    state."""
    if run.fence.attempt == 1:
        return set()
    top = _Place(
        graph,
        config,
        run.kwargs.get("interrupt_before") or graph.interrupt_before_nodes,
        run.kwargs.get("interrupt_after") or graph.interrupt_after_nodes,
    )
    inner = [
        _place(each, config) for _, each in graph.get_subgraphs(recurse=True) if isinstance(each, Pregel)
    ]
    if not any(place.before or place.after for place in (top, *inner)):
        return set()
    return await _reached_in(str(run.fence.key.run_id), saver, top)


class _Place(NamedTuple):
    """A graph, the config that reads its newest state, and where it stops."""

    graph: _Graph
    config: RunnableConfig
    before: _Where
    after: _Where


def _place(graph: _Graph, config: RunnableConfig) -> _Place:
    return _Place(graph, config, graph.interrupt_before_nodes, graph.interrupt_after_nodes)


async def _reached_in(run_id: str, saver: FencedSaver, place: _Place) -> set[str]:
    state = await place.graph.aget_state(place.config)
    ns: str = state.config["configurable"].get("checkpoint_ns", "")
    # A graph in a node that has not ended stands also behind its last step; the run's own is over there.
    if (state.next or ns) and await _stands(run_id, saver, place, state):
        return {ns}
    found, inner = set[str](), dict(place.graph.get_subgraphs())
    for task in state.tasks:
        graph = inner.get(task.name)
        if isinstance(graph, Pregel) and isinstance(task.state, dict):
            where = {**place.config["configurable"], **task.state["configurable"]}
            where.pop("checkpoint_id", None)
            where.pop("checkpoint_map", None)
            found |= await _reached_in(run_id, saver, _place(graph, {**place.config, "configurable": where}))
    return found


async def _stands(run_id: str, saver: FencedSaver, place: _Place, state: StateSnapshot) -> bool:
    metadata: dict[str, Any] = dict(state.metadata or {})
    # Where an earlier run has stopped, this one was asked to go on.
    if metadata.get("run_id") != run_id or metadata.get("source") not in _OF_ITS_STEPS:
        return False
    if _stops(place.graph, place.before, state.next):
        return True
    if not place.after or metadata["source"] == "input":
        return False
    now, ran = await saver.aget_tuple(state.config), set[str]()
    seen_before: dict[str, Any] = {}
    if state.parent_config is not None and (then := await saver.aget_tuple(state.parent_config)):
        where = {**place.config["configurable"], **state.parent_config["configurable"]}
        ran.update((await place.graph.aget_state({**place.config, "configurable": where})).next)
        seen_before = then.checkpoint["versions_seen"]
    if now is not None:  # with durability `exit` there are several steps between the two
        seen = now.checkpoint["versions_seen"]
        ran.update(name for name, versions in seen.items() if versions != seen_before.get(name))
    return _stops(place.graph, place.after, ran)


def _stops(graph: _Graph, where: _Where, names: Iterable[str]) -> bool:
    if where == "*":
        nodes = [graph.nodes[name] for name in names if name in graph.nodes]
        return any(TAG_HIDDEN not in (node.tags or ()) for node in nodes)
    return not set(where).isdisjoint(names)
