"""The server's name in the first message of TLS (RFC 8446, section 4.1.2, and RFC 6066, section 3)."""

_MOST_BYTES = 32 * 1024
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class NotTls(Exception):
    """It is no such message, or it names no server."""


class _Cut(Exception):
    """A part is longer than what holds it."""


class _Parts:
    """Reads numbers and counted parts off the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            raise _Cut
        self._at += size
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def counted(self, size: int) -> "_Parts":
        return _Parts(self.take(self.number(size)))


def server_name(data: bytes) -> str | None:
    """The name in lower case, None if more bytes are needed; NotTls if there will be none."""
    records, message = _Parts(data), b""
    try:
        while True:
            if records.number(1) != _HANDSHAKE:
                raise NotTls
            records.take(2)  # a version that means nothing any more
            message += records.take(records.number(2))
            if len(message) >= 4 and len(message) >= 4 + int.from_bytes(message[1:4], "big"):
                break
    except _Cut:
        if len(data) > _MOST_BYTES or (data and data[0] != _HANDSHAKE):
            raise NotTls from None
        return None
    try:
        return _name(_Parts(message))
    except (_Cut, UnicodeDecodeError):
        raise NotTls from None


def _name(message: _Parts) -> str:
    if message.number(1) != _CLIENT_HELLO:
        raise NotTls
    hello = message.counted(3)
    hello.take(2 + 32)  # version and random
    for size in (1, 2, 1):  # session, cipher suites, compression
        hello.counted(size)
    extensions = hello.counted(2)
    while extensions:
        kind, body = extensions.number(2), extensions.counted(2)
        if kind == _SERVER_NAME:
            names = body.counted(2)
            if names.number(1) == _HOST_NAME:
                return names.take(names.number(2)).decode("ascii").lower().rstrip(".")
    raise NotTls
