"""Answers in lines of JSON, read so that one sandbox takes neither the host's time nor its memory from the others."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sandfleet.fleet.host.agent_link import Operation
from sandfleet.fleet.host.results import Lines

_AT_ONCE = 4  # of one sandbox: each may hold 4 MiB and 10,000 entries until the caller has it
_PIECE_BYTES = 16 * 1024  # is parsed in 0.2 ms; if it is made to take long, in 3
_REST_FROM_S = 0.001


class Answers:
    """Reads the answers of one sandbox. Who asks for more than four at once waits."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Held from before the question until the answer is read."""
        async with self._slots:
            yield

    async def read(self, operation: Operation) -> list[dict[str, Any]]:
        """What an operation answers, once it has ended. Raises as ``take`` does, and ProtocolError."""
        lines = Lines(operation.asked)
        while (item := await operation.take()) is not None:
            for at in range(0, len(item[1]), _PIECE_BYTES):
                async with self._turn:
                    start = time.monotonic()
                    lines.feed(item[1][at : at + _PIECE_BYTES])
                    spent_s = time.monotonic() - start
                    # What was written to be slow gets half of the time at most, however many ask for it.
                    await asyncio.sleep(spent_s if spent_s > _REST_FROM_S else 0)
        return lines.found
