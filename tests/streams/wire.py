"""A TCP wire in front of a server, which a test can cut and mend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Wire:
    """Forwards connections to a server. While it is cut, connections are refused and the open ones are gone; while it
    is ``silent``, nothing gets through and nobody is told."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests = asyncio.Event()  # set while they get through
        self._replies = asyncio.Event()
        self.port = 0
        self.accepted = 0
        """Connections so far."""
        self.bytes_read = 0
        """From both sides."""

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    async def mend(self) -> None:
        self._requests.set()
        self._replies.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.drop()

    async def drop(self) -> None:
        """Lose the connections that are open now; new ones are taken."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence(self, *, replies_only: bool = False) -> None:
        self._replies.clear()
        if not replies_only:
            self._requests.clear()

    def strand(self) -> None:
        """The connections that are open now stay so and are silent for ever; new ones get through."""
        self.silence()
        self._requests, self._replies = asyncio.Event(), asyncio.Event()
        self._requests.set()
        self._replies.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            back, there = await asyncio.open_connection(*self._target)
            ways = [
                asyncio.create_task(self._pump(reader, there, self._requests)),
                asyncio.create_task(self._pump(back, writer, self._replies)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, audible: asyncio.Event
    ) -> None:
        while data := await source.read(65536):
            self.bytes_read += len(data)
            await audible.wait()
            sink.write(data)
            await sink.drain()


@asynccontextmanager
async def open_wire(url: str) -> AsyncIterator[tuple[Wire, str]]:
    """A wire to the server of ``url``, and the URL through it."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    wire = Wire(parts.hostname, parts.port)
    await wire.mend()
    try:
        account, at, _ = parts.netloc.rpartition("@")
        yield wire, parts._replace(netloc=f"{account}{at}127.0.0.1:{wire.port}").geturl()
    finally:
        await wire.cut()
