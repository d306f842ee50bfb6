"""No step of a graph is complete without one of its tasks.

LangGraph cancels tasks itself when another one has failed, and then the run fails. A task that somebody else has cancelled
it takes for one that has written nothing (LangGraph 1.2): the step is complete without it, and the run may end as a success
that lacks a node's work. The saver sees nothing of that where nothing is written in between (durability `exit`), so it is
seen here, before the writes of a step are applied.
"""

import asyncio
from functools import wraps
from typing import Any

from langgraph.checkpoint.serde.types import ERROR
from langgraph.errors import NodeCancelledError
from langgraph.pregel._loop import PregelLoop
from langgraph.types import PregelExecutableTask

_after_tick = PregelLoop.after_tick


def install() -> None:
    """From now on a step that lacks a task raises NodeCancelledError, which names the node. May be repeated."""
    PregelLoop.after_tick = _after_whole_tick  # type: ignore[method-assign]


@wraps(_after_tick)
def _after_whole_tick(self: PregelLoop) -> Any:
    for task in self.tasks.values():
        if _was_cancelled(task):
            raise NodeCancelledError(task.name, f"The node {task.name!r} was cancelled while it was at work.")
    return _after_tick(self)


def _was_cancelled(task: PregelExecutableTask) -> bool:
    if task.path[-1] is True:  # a call that another task has made, which may have given it up
        return False
    return any(
        channel == ERROR and isinstance(value, asyncio.CancelledError) for channel, value in task.writes
    )
