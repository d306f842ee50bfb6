"""Run steps side by side, or one to its end although the caller is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@overload
async def parallel(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], /) -> tuple[A, B]: ...
@overload
async def parallel(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], third: Coroutine[Any, Any, C], /
) -> tuple[A, B, C]: ...
@overload
async def parallel(*steps: Coroutine[Any, Any, Any]) -> tuple[Any, ...]: ...
async def parallel(*steps: Coroutine[Any, Any, Any]) -> tuple[Any, ...]:
    """The results of all steps, in order. Unlike `asyncio.gather` nothing goes on after a failure."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(step) for step in steps]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return tuple(task.result() for task in tasks)


async def uninterrupted(step: Coroutine[Any, Any, A]) -> A:
    """The result of a step that goes on when the caller is cancelled; the cancellation comes out after its end."""
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
