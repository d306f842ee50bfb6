"""Waiting on conditions instead of sleeping."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def eventually(condition: Callable[[], Any], deadline_s: float = 60.0, what: str = "condition") -> Any:
    """Return the first truthy result of ``condition``, asked every 20 ms; fail with its last result at the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        result = condition()
        value = await result if inspect.isawaitable(result) else result
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not hold within {deadline_s} s; last: {value!r}")
        await asyncio.sleep(0.02)
