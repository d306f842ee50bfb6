"""A database connection that is opened again when it was lost, used by one statement at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection


class Session:
    """One connection in autocommit mode. What fails on it raises; the next use opens it anew."""

    def __init__(self, database_url: str, name: str) -> None:
        self._database_url = database_url
        self._name = name
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection[Any] | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """The connection, for this block alone. Raises psycopg.OperationalError when the server is away."""
        async with self._lock:
            if self._connection is None or self._connection.closed:
                self._connection = await AsyncConnection.connect(
                    self._database_url,
                    autocommit=True,
                    connect_timeout=5,
                    prepare_threshold=2,
                    application_name=self._name,
                )
            try:
                yield self._connection
            except (psycopg.OperationalError, psycopg.InterfaceError):
                await self.close()
                raise

    async def close(self) -> None:
        """Close the connection if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
