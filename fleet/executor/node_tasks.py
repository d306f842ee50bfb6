"""The tasks of a run's nodes, so that none outlives the run unseen.

LangGraph cancels its nodes' tasks and waits for them, but a second cancellation ends that wait: a node that swallowed the
first one would go on by itself.
"""

import asyncio
from collections.abc import Iterator
from types import CoroutineType
from typing import Any

from langgraph.pregel._executor import gated
from langgraph.pregel._retry import arun_with_retry

from sandfleet.fleet.executor.intercept_tools import LEDGER_KEY
from sandfleet.fleet.executor.tool_ledger import ToolLedger
from sandfleet.shared.ids import Fence

_TELL_AGAIN_S = 5.0


async def cancel_until_ended(fence: Fence) -> None:
    """Cancel the nodes of an attempt that still work on this event loop, again and again; returns when all have ended.

    Not those of the run: an executor that lost it, as by being frozen, may have claimed it again.
    """
    while left := set(_of_attempt(fence)):
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=_TELL_AGAIN_S)


def _of_attempt(fence: Fence) -> Iterator["asyncio.Task[Any]"]:
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if _locals(coroutine, gated) is not None:  # with a limit on concurrent nodes
            coroutine = _locals(coroutine, gated)["coro"]
        node = (_locals(coroutine, arun_with_retry) or {}).get("task")
        if node is not None:
            ledger: ToolLedger | None = node.config.get("configurable", {}).get(LEDGER_KEY)
            if ledger is not None and ledger.fence == fence:
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
