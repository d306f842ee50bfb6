"""The way to the host's forward proxy: a port of the sandbox's loopback, joined with a unix socket of the host's.

The sandbox has no other interface, so nothing but the proxy can be reached through it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent

PROXY_SOCKET = "proxy.sock"
PORT = 3128
_MOST = 64  # connections; the proxy takes no more of one sandbox
_CHUNK = 65536
_BACKLOG = 4 * _CHUNK  # of what one end has sent and the other does not take


class Relay:
    """Listens if the host has a proxy for this sandbox, and serves on the agent's loop."""

    def __init__(self, agent: Agent, folder: str) -> None:
        self._path = os.path.join(folder, PROXY_SOCKET)
        self.selector = agent.selector
        self._joined: set[_Joined] = set()
        self._most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if os.path.exists(self._path):
            self._listener = socket.create_server(("127.0.0.1", PORT), backlog=128)
            self._listener.setblocking(False)
            self._listen()

    def _listen(self) -> None:
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        inner, outer = None, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner, _ = self._listener.accept()
            outer.setblocking(False)
            outer.connect(self._path)
        except OSError:  # the host is away or busy: the caller sees a connection that ends
            outer.close()
            if inner is not None:
                inner.close()
            return
        inner.setblocking(False)
        self._joined.add(_Joined(self, inner, outer))
        if len(self._joined) == self._most:
            self.selector.unregister(self._listener)

    def ended(self, joined: _Joined) -> None:
        """Forget a pair of connections; others may come in its place."""
        if len(self._joined) == self._most:
            self._listen()
        self._joined.discard(joined)


class _Joined:
    """Two connections, of which each gets what the other sends."""

    def __init__(self, relay: Relay, inner: socket.socket, outer: socket.socket) -> None:
        self._relay = relay
        self._ways = (_End(self, inner), _End(self, outer))
        self._ways[0].other, self._ways[1].other = self._ways[1], self._ways[0]
        self.watch()

    def watch(self) -> None:
        """Wait for what can happen next; when nothing can, both are closed."""
        if all(end.finished for end in self._ways):
            self.close()
            return
        for end in self._ways:
            end.watch(self._relay.selector)

    def close(self) -> None:
        """Close both."""
        for end in self._ways:
            end.close(self._relay.selector)
        self._relay.ended(self)


class _End:
    """One of two connections, and what it has still to get."""

    other: _End

    def __init__(self, joined: _Joined, connection: socket.socket) -> None:
        self._joined = joined
        self._connection = connection
        self._pending = bytearray()
        self._told_end = False
        self.sent_all = False
        self._events = 0

    @property
    def finished(self) -> bool:
        """Whether it has sent all, and got all that the other sent."""
        return self.sent_all and self._told_end

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Tell the selector what this end waits for."""
        events = selectors.EVENT_WRITE if self._pending else 0
        if not self.sent_all and len(self.other._pending) < _BACKLOG:
            events |= selectors.EVENT_READ
        if events and self._events:
            selector.modify(self._connection, events, self._ready)
        elif events:
            selector.register(self._connection, events, self._ready)
        elif self._events:
            selector.unregister(self._connection)
        self._events = events

    def _ready(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._read()
            if mask & selectors.EVENT_WRITE:
                self.send()
        except OSError:
            self._joined.close()
        else:
            self._joined.watch()

    def _read(self) -> None:
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return
        self.sent_all = not data
        self.other._pending += data
        self.other.send()

    def send(self) -> None:
        """Send what is pending as far as it goes, and the end behind it."""
        with contextlib.suppress(BlockingIOError):
            while self._pending:
                del self._pending[: self._connection.send(self._pending[:_CHUNK])]
            if self.other.sent_all and not self._told_end:
                self._told_end = True
                self._connection.shutdown(socket.SHUT_WR)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Close it; what is pending is lost."""
        if self._events:
            selector.unregister(self._connection)
            self._events = 0
        self._connection.close()
