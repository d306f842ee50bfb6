"""The tasks of a run's nodes, so that none outlives the run unseen.

LangGraph cancels its nodes' tasks and waits for them, but a second cancellation ends that wait: a node that swallowed the
first one would go on by itself.
"""

import asyncio
from collections.abc import Iterator
from types import CoroutineType
from typing import Any
from uuid import UUID

from langgraph.pregel._executor import gated
from langgraph.pregel._retry import arun_with_retry

_TELL_AGAIN_S = 5.0


async def cancel_until_ended(run_id: UUID) -> None:
    """Cancel the nodes of a run that still work on this event loop, again and again; returns when all have ended."""
    while left := set(_of_run(str(run_id))):
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_TELL_AGAIN_S)


def _of_run(run_id: str) -> Iterator["asyncio.Task[Any]"]:
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if _locals(coroutine, gated) is not None:  # with a limit on concurrent nodes
            coroutine = _locals(coroutine, gated)["coro"]
        node = (_locals(coroutine, arun_with_retry) or {}).get("task")
        if node is not None and str(node.config.get("configurable", {}).get("run_id")) == run_id:
            yield task


def _locals(coroutine: Any, function: Any) -> Any:
    """The local variables of a suspended coroutine, if it is one of ``function``."""
    if (
        isinstance(coroutine, CoroutineType)
        and coroutine.cr_code is function.__code__
        and coroutine.cr_frame is not None
    ):
        return coroutine.cr_frame.f_locals
    return None
