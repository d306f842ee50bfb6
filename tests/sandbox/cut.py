"""A TCP proxy before PostgreSQL that a test can cut."""

import asyncio
import contextlib
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    """Forwards to the server of ``database_url``; ``url`` leads through it, by the address ``at`` of this machine."""

    def __init__(self, database_url: str, at: str = "127.0.0.1") -> None:
        self._parts = urlsplit(database_url)
        self._at = at
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._port = 0

    @property
    def url(self) -> str:
        account = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{account}@{self._at}:{self._port}"))

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def mend(self) -> None:
        """Accept connections (again)."""
        self._server = await asyncio.start_server(self._forward, self._at, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break all connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        self._writers |= {writer, back_writer}
        await asyncio.gather(_copy(reader, back_writer), _copy(back_reader, writer))
        self._writers -= {writer, back_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
