"""Two ways from a tool call to the database: on the graphs' loop, and around it for callers that may be blocking it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import uvloop

from sandfleet.fleet.executor.fenced_writer import ExecutorStopped, FencedWriter
from sandfleet.fleet.executor.session import Session
from sandfleet.shared.db.pool import Pool

T = TypeVar("T")


class Link(NamedTuple):
    """A writer and connections that live on one event loop."""

    writer: FencedWriter
    connections: Pool | Session


Work = Callable[[Link], Coroutine[Any, Any, T]]


class LedgerLinks:
    """One per process. Async tools use the graphs' loop and its writer, and are flushed together with everything else.

    Other threads, and loops of their own, cannot: an async node may hold the graphs' loop while it waits for them. For
    them a thread with a writer of its own starts at first use.
    """

    def __init__(self, database_url: str, writer: FencedWriter, pool: Pool) -> None:
        self._database_url = database_url
        self._here = Link(writer, pool)
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._side: Link | None = None

    def on_loop(self) -> bool:
        """Whether the current code is a coroutine on the graphs' loop."""
        return asyncio.get_running_loop() is self._here.writer.loop

    async def use(self, work: Work[T]) -> T:
        """Do ``work`` from whatever event loop this is."""
        if self.on_loop():
            return await work(self._here)
        return await asyncio.wrap_future(self._elsewhere(work))

    def use_blocking(self, work: Work[T]) -> T:
        """Do ``work`` and wait for it in this thread, whichever it is."""
        return self._elsewhere(work).result()

    async def aclose(self) -> None:
        """Write what is pending and end the thread, if there is one."""
        with self._lock:
            self._closed = True
            loop, side = self._loop, self._side
        if loop is not None and side is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_close(side), loop))
            loop.call_soon_threadsafe(loop.stop)

    def _elsewhere(self, work: Work[T]) -> "Future[T]":
        with self._lock:
            if self._closed:
                raise ExecutorStopped("The executor has stopped.")
            if self._loop is None:
                self._start()
            assert self._loop is not None
            assert self._side is not None
            return asyncio.run_coroutine_threadsafe(work(self._side), self._loop)

    def _start(self) -> None:
        loop = uvloop.new_event_loop()
        threading.Thread(target=_serve, args=[loop], name="ledger", daemon=True).start()
        writer = FencedWriter(self._database_url)
        asyncio.run_coroutine_threadsafe(writer.start(), loop).result()
        self._loop = loop
        self._side = Link(writer, Session(self._database_url, "sandfleet-ledger", 10.0))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _close(link: Link) -> None:
    await link.writer.stop()
    await link.connections.close()
