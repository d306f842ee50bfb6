"""A client that is cut off after any number of bytes, and comes back as the standard says: by the id of its last event."""

import asyncio
from dataclasses import dataclass, field

from sandfleet.shared.streams.follow import StreamEvent


@dataclass
class Part:
    """What one response came to: its bytes, and whether it ended as a response should."""

    status: int
    body: bytes
    whole: bool


async def get(port: int, path: str, headers: dict[str, bytes], limit: int | None = None) -> Part:
    """GET, and cut the connection after ``limit`` bytes from the server, head and framing included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = [b"%s: %s\r\n" % (name.encode(), value) for name, value in headers.items()]
        writer.write(b"GET %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n" % (path.encode(), b"".join(lines)))
        got = b""
        while limit is None or len(got) < limit:
            piece = await reader.read(65536 if limit is None else limit - len(got))
            got += piece
            if not piece or _parse(got).whole:
                break
        return _parse(got)
    finally:
        writer.transport.abort()


def _parse(got: bytes) -> Part:
    head, found, rest = got.partition(b"\r\n\r\n")
    if not found:
        return Part(0, b"", False)
    status = int(head.split(b" ", 2)[1])
    names = {line.partition(b":")[0].lower(): line.partition(b":")[2].strip() for line in head.split(b"\r\n")}
    if b"content-length" in names:
        length = int(names[b"content-length"])
        return Part(status, rest[:length], len(rest) >= length)
    body = b""
    while True:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            return Part(status, body, False)
        length = int(size, 16)
        if length == 0:
            return Part(status, body, rest.startswith(b"\r\n"))
        body += rest[:length]
        if len(rest) < length + 2:
            return Part(status, body, False)
        rest = rest[length + 2 :]


def dispatched(body: bytes, cursor: str | None) -> tuple[list[StreamEvent], str | None]:
    """The events that a body holds in full, and the id to come back with: an event counts when the empty line behind it is
    there."""
    events = []
    *blocks, _ = body.split(b"\r\n\r\n")
    for block in blocks:
        fields = dict(line.partition(b": ")[::2] for line in block.split(b"\r\n"))
        if b"id" in fields:
            cursor = fields[b"id"].decode()
        if b"event" in fields:
            id_ = fields[b"id"].decode() if b"id" in fields else None
            events.append(StreamEvent(id_, fields[b"event"].decode(), fields[b"data"].decode()))
    return events, cursor


@dataclass
class RawClient:
    """Follows one run; ``limits`` are the bytes after which its connections are cut, one after the other."""

    port: int
    path: str
    key: str
    limits: list[int]
    cursor: str | None = "0"
    seen: list[StreamEvent] = field(default_factory=list)

    async def follow(self) -> list[StreamEvent]:
        """All events up to ``end``."""
        while not self.seen or self.seen[-1].event != "end":
            headers = {"x-api-key": self.key.encode()}
            if self.cursor is not None:
                headers["last-event-id"] = self.cursor.encode()
            limit = self.limits.pop(0) if self.limits else None
            part = await get(self.port, self.path, headers, limit)
            events, self.cursor = dispatched(part.body, self.cursor)
            self.seen += events
            if not part.whole:
                while self.seen and self.seen[-1].id is None:  # it will be told again
                    self.seen.pop()
        return self.seen
