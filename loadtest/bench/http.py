"""An HTTP/1.1 client that costs little: it shares the machine with what it measures.

One connection does one exchange at a time; what arrives is stamped when its bytes are read, before any parsing.
"""

import asyncio
import time
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools


class ConnectionLost(Exception):
    """The server closed the connection before the answer was complete."""


class Exchange:
    """One request's answer. Times are `time.monotonic` seconds."""

    def __init__(self) -> None:
        self.status = 0
        self.head_at_s = 0.0
        self.end_at_s = 0.0
        self.body = b""
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, data: bytes, at_s: float) -> None:
        """A piece of the body; subclasses read streams here."""
        self.body += data


E = TypeVar("E", bound=Exchange)


class Connection(asyncio.Protocol):
    """A keep-alive connection. Also the callbacks that httptools calls while it parses."""

    def __init__(self, host: str, headers: dict[str, str]) -> None:
        lines = {"host": host, "content-type": "application/json", "accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._exchange: Exchange | None = None
        self._read_at_s = 0.0
        self.closed = False

    @classmethod
    async def open(cls, base_url: str, headers: dict[str, str]) -> "Connection":
        """Connect to ``base_url``; ``headers`` go with every request."""
        parts = urlsplit(base_url)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(parts.netloc, headers), parts.hostname or "127.0.0.1", parts.port or 80
        )
        return connection

    async def ask(self, exchange: E, method: str, path: str, body: bytes = b"") -> E:
        """Send a request and wait for the end of its answer. Raises `ConnectionLost`."""
        if self.closed:
            raise ConnectionLost
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        head = f"{method} {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        await exchange.finished
        return exchange

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    # --- asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._read_at_s = time.monotonic()
        if self._exchange is not None:
            self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._exchange is not None and not self._exchange.finished.done():
            self._exchange.finished.set_exception(ConnectionLost())

    # --- httptools -------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.head_at_s = self._read_at_s
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None:
            self._exchange.feed(data, self._read_at_s)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.finished.done():
            exchange.end_at_s = self._read_at_s
            exchange.finished.set_result(None)
