"""The server's name in the first message of TLS (RFC 8446, section 4.1.2, and RFC 6066, section 3).

Who sends it is hostile: what is read is read once, however small the pieces that it comes in.
"""

_MOST_BYTES = 32 * 1024
_MOST_RECORDS = 16  # for one message; clients send one
_RECORD_HEADER = 5
_RECORD_BYTES = 2**14  # at most, and never none (RFC 8446, section 5.1)
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


class ClientHello:
    """The first message of a connection, as its bytes come."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._at = 0  # where the next record begins
        self._records = 0
        self._message = bytearray()

    def feed(self, data: bytes) -> str | None:
        """The name in lower case once the message is whole, None until then; NotTls if there will be none."""
        self._data += data
        while self._at < len(self._data):
            if self._data[self._at] != _HANDSHAKE:
                raise NotTls
            body = (
                self._at + _RECORD_HEADER
            )  # behind the kind, a version that means nothing any more, and the length
            if len(self._data) < body:
                break
            size = int.from_bytes(self._data[body - 2 : body], "big")
            if not 0 < size <= _RECORD_BYTES or self._records == _MOST_RECORDS:
                raise NotTls
            if len(self._data) < body + size:
                break
            self._message += self._data[body : body + size]
            self._at = body + size
            self._records += 1
            if len(self._message) >= 4 and len(self._message) >= self._wanted():
                return self._name()
        if max(len(self._data), self._wanted()) > _MOST_BYTES:
            raise NotTls
        return None

    def _wanted(self) -> int:
        """Bytes of the whole message, as its head says."""
        return 4 + int.from_bytes(self._message[1:4], "big")

    def _name(self) -> str:
        try:
            return _name(_Parts(bytes(self._message)))
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
