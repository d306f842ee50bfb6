"""Breakpoints, where a graph stops before or after a node until another run goes on, and attempts that begin at one.

LangGraph takes whoever goes on from a checkpoint without an input for somebody who was asked and lets the graph pass. An
attempt that begins where an earlier one of its run was lost was not: what needs approval would be done without.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.constants import TAG_HIDDEN
from langgraph.pregel import Pregel
from langgraph.types import All

from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.shared.store.claims import ClaimedRun

_OF_ITS_STEPS = ("input", "loop")  # other checkpoints are begun with, past a breakpoint that may be there


async def stands_at_one(
    run: ClaimedRun, saver: FencedSaver, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig
) -> bool:
    """Whether an earlier attempt of the run has come to a breakpoint, so that there is nothing left to do but to end. Raises
    as LangGraph does when it reads a thread's state."""
    before = run.kwargs.get("interrupt_before") or graph.interrupt_before_nodes
    after = run.kwargs.get("interrupt_after") or graph.interrupt_after_nodes
    if not run.resumes or not (before or after):
        return False
    state = await graph.aget_state(config)
    source = (state.metadata or {}).get("source")
    if not state.next or source not in _OF_ITS_STEPS:
        return False
    if _stops(graph, before, state.next):
        return True
    if not after or source == "input":
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


def _stops(graph: Pregel[Any, Any, Any, Any], where: All | Sequence[str], names: Iterable[str]) -> bool:
    if where == "*":
        nodes = [graph.nodes[name] for name in names if name in graph.nodes]
        return any(TAG_HIDDEN not in (node.tags or ()) for node in nodes)
    return not set(where).isdisjoint(names)
