"""A database connection that is opened again when it was lost, used by one statement at a time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from sandfleet.shared.db.vanished import KEEPALIVES, answered_within

_LIMITS = {"lock_timeout": "2s", "idle_in_transaction_session_timeout": "5s"}
"""No statement of the control loop waits longer for somebody's lock: it fails and is tried again."""


class Session:
    """One connection in autocommit mode. What fails on it raises; the next use opens it anew.

    A use takes ``limit_s`` at most: a server that has vanished, or is frozen, must not hold the loop that asks. ``limits``
    are settings of the session, in the server, in place of the usual ones.
    """

    def __init__(
        self, database_url: str, name: str, limit_s: float, limits: Mapping[str, str] = _LIMITS
    ) -> None:
        self._database_url = database_url
        self._name = name
        self._limit_s = limit_s
        self._options = " ".join(f"-c {setting}={value}" for setting, value in limits.items())
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection[Any] | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """The connection, for this block alone. Raises psycopg.Error when a statement fails, the server is away, or the
        limit is over."""
        async with self._lock:
            if self._connection is None or self._connection.closed:
                self._connection = await self._connect()
            try:
                with answered_within(self._connection, self._limit_s):
                    yield self._connection
            except BaseException:
                if self._connection.info.transaction_status is not TransactionStatus.IDLE:
                    await self._drop()
                raise

    async def _connect(self) -> AsyncConnection[Any]:
        return await AsyncConnection.connect(
            self._database_url,
            autocommit=True,
            connect_timeout=5,
            prepare_threshold=2,
            application_name=self._name,
            options=self._options,
            **KEEPALIVES,
        )

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()

    async def close(self) -> None:
        """Close the connection if there is one."""
        await self._drop()
