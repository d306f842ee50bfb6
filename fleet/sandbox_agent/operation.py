"""What all operations of the agent share."""

from __future__ import annotations

import sys

from . import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

    Json = dict[str, Any]


# What a request raises that lacks a field or has one of a wrong type.
BAD_REQUEST = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


_MOST_S = 1e8


class Refused(Exception):
    """An operation that cannot be done: a stable code and a message for the caller."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def seconds(value: object) -> float:
    """A duration from a request; ValueError for what is none, such as NaN, which would break the event loop."""
    number = float(value)  # type: ignore[arg-type]
    if not 0 <= number <= _MOST_S:
        raise ValueError(f"{number} is no time in seconds")
    return number


class Operation:
    """One operation under way: its id, the credit for content to the host, and the window for content from it."""

    def __init__(self, agent: Agent, op: int) -> None:
        self.agent = agent
        self.op = op
        self.credit = wire.WINDOW  # bytes that may still be sent
        self.window = wire.WINDOW  # bytes that may still come

    def data(self, body: bytes) -> None:
        """Content from the host; what takes none gives it back."""
        self.grant(len(body))

    def eof(self) -> None:
        """The end of the host's content."""

    def granted(self) -> None:
        """More credit arrived."""

    def resize(self, rows: int, columns: int) -> None:
        """The host's terminal has another size."""

    def tick(self, now: float) -> float | None:
        """Do what is due and return when to be called again, on the monotonic clock; None: when something happens."""
        return None

    def kill(self) -> None:
        """Abandon the operation."""
        self.refuse("killed", "the operation was abandoned")

    def detach(self) -> None:
        """The connection is lost: nobody hears of this operation any more, so it ends."""
        self.credit = self.window = sys.maxsize  # what it sends is dropped
        self.kill()

    def send(self, kind: int, body: bytes) -> None:
        """Send content, never more than there is credit for."""
        self.credit -= len(body)
        self.agent.send(kind, self.op, body)

    def send_some(self, kind: int, content: memoryview) -> memoryview:
        """Send as much of ``content`` as there is credit for, and return the rest."""
        while content and self.credit > 0:
            size = min(wire.CHUNK, self.credit)
            self.send(kind, bytes(content[:size]))
            content = content[size:]
        return content

    def grant(self, size: int) -> None:
        """Let the host send ``size`` bytes more."""
        self.window += size
        self.agent.send(wire.CREDIT, self.op, wire.CREDIT_BODY.pack(size))

    def done(self, result: Json) -> None:
        """End the operation with its result."""
        self.agent.end(self, wire.DONE, result)

    def refuse(self, code: str, message: str) -> None:
        """End the operation with a failure."""
        self.agent.end(self, wire.FAIL, {"code": code, "message": message[:1000]})
