"""What a run's stored parameters mean to LangGraph: config, input, stream modes, durability."""

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.types import Command, Durability, Send

from sandfleet.shared.store.claims import ClaimedRun

# LangGraph's own key: a saver given here is used instead of the graph's.
_CHECKPOINTER = "__pregel_checkpointer"

_GRAPH_MODE = {"messages-tuple": "messages"}


def build_config(
    run: ClaimedRun, saver: BaseCheckpointSaver[Any], callbacks: Sequence[BaseCallbackHandler]
) -> RunnableConfig:
    """The config of a run: the caller's, with the ids, our checkpointer and callbacks that it may not replace."""
    given: dict[str, Any] = run.kwargs.get("config") or {}
    configurable: dict[str, Any] = {
        **{k: v for k, v in (given.get("configurable") or {}).items() if not k.startswith("__")},
        "thread_id": str(run.thread_id),
        "run_id": str(run.fence.key.run_id),
        "assistant_id": str(run.assistant_id),
        "graph_id": run.graph_id,
        "user_id": run.fence.key.user_id,
        "tenant_id": run.fence.key.tenant,
        "checkpoint_ns": "",
        _CHECKPOINTER: saver,
    }
    configurable.pop("checkpoint_id", None)
    checkpoint = run.kwargs.get("checkpoint")
    if checkpoint and not run.resumes:
        configurable["checkpoint_id"] = checkpoint.get("checkpoint_id")
        if checkpoint.get("checkpoint_ns"):
            configurable["checkpoint_ns"] = checkpoint["checkpoint_ns"]
        if checkpoint.get("checkpoint_map"):
            configurable["checkpoint_map"] = checkpoint["checkpoint_map"]
    config: RunnableConfig = {
        "configurable": configurable,
        "metadata": {**run.metadata, "run_id": str(run.fence.key.run_id)},
        "callbacks": list(callbacks),
        "run_id": run.fence.key.run_id,
        "tags": given.get("tags") or [],
    }
    if "recursion_limit" in given:
        config["recursion_limit"] = given["recursion_limit"]
    if "max_concurrency" in given:
        config["max_concurrency"] = given["max_concurrency"]
    if given.get("run_name"):
        config["run_name"] = given["run_name"]
    return config


def head_config(run: ClaimedRun, saver: BaseCheckpointSaver[Any]) -> RunnableConfig:
    """The config that reads the newest state of the run's thread."""
    return {"configurable": {"thread_id": str(run.thread_id), "checkpoint_ns": "", _CHECKPOINTER: saver}}


def build_input(run: ClaimedRun) -> Any:
    """What to start the graph with: None goes on from the newest checkpoint."""
    if run.resumes:
        return None
    command: dict[str, Any] | None = run.kwargs.get("command")
    if not command:
        return run.kwargs.get("input")
    arguments: dict[str, Any] = {}
    if "resume" in command:
        arguments["resume"] = command["resume"]
    if command.get("update") is not None:
        arguments["update"] = _update(command["update"])
    if command.get("goto") is not None:
        goto = command["goto"]
        arguments["goto"] = [_destination(g) for g in goto] if isinstance(goto, list) else _destination(goto)
    return Command(**arguments)


def _update(update: Any) -> Any:
    """A list of pairs is a list of (channel, value) writes; JSON has no tuples."""
    if isinstance(update, list) and all(
        isinstance(u, list) and len(u) == 2 and isinstance(u[0], str) for u in update
    ):
        return [tuple(u) for u in update]
    return update


def _destination(goto: Any) -> str | Send:
    return Send(goto["node"], goto.get("input")) if isinstance(goto, dict) else goto


def graph_modes(requested: Sequence[str]) -> set[str]:
    """LangGraph's names of the stream modes that a client asked for."""
    return {_GRAPH_MODE.get(mode, mode) for mode in requested}


def durability(run: ClaimedRun) -> Durability:
    """``exit`` if asked for, else ``sync``: what ``async`` promises, and after a crash no step runs twice that was
    seen to end. With gathered writes it costs no more."""
    mode: Literal["exit", "sync"] = "exit" if run.kwargs.get("durability") == "exit" else "sync"
    return mode
