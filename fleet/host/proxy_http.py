"""HTTP as a forward proxy speaks it: one request of a client, refused, turned into a tunnel, or passed on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import h11

Passed = Callable[[int, int], Awaitable[None]]
"""Told of bytes that went up and down; waits as long as the next ones shall."""

_CHUNK = 64 * 1024
# RFC 9110, section 7.6.1; lengths are added again by h11.
_HOP_BY_HOP = frozenset(
    [
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    ]
)


class Exchange:
    """One request on one connection, which is closed after it. Raises h11.ProtocolError for what is no HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_head: int) -> None:
        self._reader = reader
        self._writer = writer
        self._near = h11.Connection(h11.SERVER, max_incomplete_event_size=most_head)
        self._request: h11.Request | None = None

    async def head(self, coming: Callable[[int], Awaitable[None]]) -> h11.Request:
        """The request's first line and headers. ``coming`` is told of bytes before they are parsed, and may wait."""
        event = await _next(self._near, self._reader, coming)
        if not isinstance(event, h11.Request):
            raise h11.RemoteProtocolError("no request")
        self._request = event
        return event

    async def accept_tunnel(self) -> None:
        """Answer a CONNECT; from here on the connection is the tunnel's."""
        self._writer.write(self._near.send(h11.Response(status_code=200, headers=[])) or b"")
        await self._writer.drain()

    @property
    def trailing(self) -> bytes:
        """What came behind the head of a CONNECT."""
        return self._near.trailing_data[0]

    async def pass_on(
        self, far: tuple[asyncio.StreamReader, asyncio.StreamWriter], host: str, path: str, passed: Passed
    ) -> None:
        """Send the request to a server as one for ``host`` and ``path``, and its answer back."""
        reader, writer = far
        client = h11.Connection(h11.CLIENT)
        assert self._request is not None
        headers = [
            (b"Host", host.encode()),
            *_end_to_end(self._request.headers, b"host"),
            (b"Connection", b"close"),
        ]
        writer.write(
            client.send(h11.Request(method=self._request.method, target=path, headers=headers)) or b""
        )
        if self._near.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            self._writer.write(self._near.send(go_on) or b"")
        while not isinstance(event := await _next(self._near, self._reader), h11.EndOfMessage):
            data = client.send(event) or b""
            writer.write(data)
            await writer.drain()
            await passed(len(data), 0)
        writer.write(client.send(event) or b"")
        await writer.drain()
        while True:
            event = await _next(client, reader)
            if isinstance(event, h11.Response):
                headers = [*_end_to_end(event.headers), (b"Connection", b"close")]
                event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
            elif isinstance(event, h11.InformationalResponse):
                continue
            data = self._near.send(event) or b""
            self._writer.write(data)
            await self._writer.drain()
            await passed(0, len(data))
            if isinstance(event, h11.EndOfMessage):
                return


async def refuse(writer: asyncio.StreamWriter, status: int, message: str) -> None:
    """Answer that a request is not passed on, in words that a model reads."""
    body = f"sandfleet: {message}\n".encode()
    head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await writer.drain()


async def _next(
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    coming: Callable[[int], Awaitable[None]] | None = None,
) -> h11.Event:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(_CHUNK)
            if coming is not None:
                await coming(len(data))
            connection.receive_data(data)
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise h11.RemoteProtocolError("the connection ended early")
        else:
            assert not isinstance(event, type)
            return event


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], *but: bytes) -> list[tuple[bytes, bytes]]:
    headers = list(headers)
    named = {
        name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named | set(but)
    return [(key, value) for key, value in headers if key not in dropped]
