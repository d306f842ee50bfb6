"""Noticing a PostgreSQL server that is gone without a word, or that holds a connection open and does not answer."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from psycopg import AsyncConnection

KEEPALIVES: dict[str, Any] = {
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""libpq's parameters by which a machine that has vanished is noticed within about 15 s. A server that is stopped, with its
machine alive, still acknowledges what it is sent: see `answered_within`."""


@contextmanager
def answered_within(connection: AsyncConnection[Any], limit_s: float) -> Iterator[None]:
    """Lose the connection if the block takes longer than ``limit_s``: what waits on it raises OperationalError.

    A cancellation would not do: psycopg answers it by asking the server to cancel, and waits for that.
    """
    timer = asyncio.get_running_loop().call_later(limit_s, _hang_up, connection)
    try:
        yield
    finally:
        timer.cancel()


def _hang_up(connection: AsyncConnection[Any]) -> None:
    if connection.closed:
        return
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)
