"""Breakpoints, where a graph stops before or after a node until another run goes on, and attempts that begin at one.

LangGraph takes whoever goes on from a checkpoint without an input for somebody who was asked and lets the graph pass, and with
it all graphs in its nodes. An attempt that begins where an earlier one of its run was lost was not asked: what needs approval
would be done without. Graphs within nodes are those that LangGraph finds there, as for a state with its subgraphs.
"""

from collections.abc import Iterable, Sequence
from typing import Any

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
    before = run.kwargs.get("interrupt_before") or graph.interrupt_before_nodes
    after = run.kwargs.get("interrupt_after") or graph.interrupt_after_nodes
    if run.fence.attempt == 1:
        return set()
    if not (before or after) and not any(_has_some(inner) for _, inner in graph.get_subgraphs(recurse=True)):
        return set()
    return await _reached_in(run, saver, graph, config, before, after)


def _has_some(graph: object) -> bool:
    return isinstance(graph, Pregel) and bool(graph.interrupt_before_nodes or graph.interrupt_after_nodes)


async def _reached_in(
    run: ClaimedRun, saver: FencedSaver, graph: _Graph, config: RunnableConfig, before: _Where, after: _Where
) -> set[str]:
    state = await graph.aget_state(config)
    ns: str = state.config["configurable"].get("checkpoint_ns", "")
    # A graph in a node that has not ended stands also behind its last step; the run's own is over there.
    if (
        (before or after)
        and (state.next or ns)
        and await _stands(run, saver, graph, config, state, before, after)
    ):
        return {ns}
    found, inner_graphs = set[str](), dict(graph.get_subgraphs())
    for task in state.tasks:
        inner = inner_graphs.get(task.name)
        if not isinstance(inner, Pregel) or not isinstance(task.state, dict):
            continue
        place = {**config["configurable"], **task.state["configurable"]}
        for key in ("checkpoint_id", "checkpoint_map"):
            place.pop(key, None)
        found |= await _reached_in(
            run,
            saver,
            inner,
            {**config, "configurable": place},
            inner.interrupt_before_nodes,
            inner.interrupt_after_nodes,
        )
    return found


async def _stands(
    run: ClaimedRun,
    saver: FencedSaver,
    graph: _Graph,
    config: RunnableConfig,
    state: StateSnapshot,
    before: _Where,
    after: _Where,
) -> bool:
    metadata: dict[str, Any] = dict(state.metadata or {})
    # Where an earlier run has stopped, this one was asked to go on.
    if metadata.get("run_id") != str(run.fence.key.run_id) or metadata.get("source") not in _OF_ITS_STEPS:
        return False
    if _stops(graph, before, state.next):
        return True
    if not after or metadata["source"] == "input":
        return False
    now, ran = await saver.aget_tuple(state.config), set[str]()
    seen_before: dict[str, Any] = {}
    if state.parent_config is not None and (then := await saver.aget_tuple(state.parent_config)):
        place = {**config["configurable"], **state.parent_config["configurable"]}
        ran.update((await graph.aget_state({**config, "configurable": place})).next)
        seen_before = then.checkpoint["versions_seen"]
    if now is not None:  # with durability `exit` there are several steps between the two
        seen = now.checkpoint["versions_seen"]
        ran.update(name for name, versions in seen.items() if versions != seen_before.get(name))
    return _stops(graph, after, ran)


def _stops(graph: _Graph, where: _Where, names: Iterable[str]) -> bool:
    if where == "*":
        nodes = [graph.nodes[name] for name in names if name in graph.nodes]
        return any(TAG_HIDDEN not in (node.tags or ()) for node in nodes)
    return not set(where).isdisjoint(names)
