"""Run steps side by side; the first failure cancels the others and comes out as itself."""

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
