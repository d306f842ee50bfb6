"""Connection pools. Autocommit: a statement is a transaction unless a block says otherwise."""

import time
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

Pool = AsyncConnectionPool[AsyncConnection[TupleRow]]


def open_pool(
    database_url: str,
    max_size: int,
    *,
    min_size: int = 1,
    prepare: bool = True,
    check_after_s: float = 0.0,
    name: str = "sandfleet",
) -> Pool:
    """A pool that is still closed; ``await pool.open()`` before use.

    Connections are checked when they are handed out, because a Lambda is frozen between requests and a server may have
    been restarted. Those that passed a check within ``check_after_s`` are not checked again, which saves a round trip
    per use; after a restart of the server each of them may fail once. ``prepare=False`` is for RDS Proxy, which pins a
    session that prepares statements.
    """
    return AsyncConnectionPool(
        database_url,
        min_size=min_size,
        max_size=max_size,
        open=False,
        check=_check_idle(check_after_s),
        timeout=10.0,
        max_idle=300.0,
        name=name,
        kwargs={
            "autocommit": True,
            "prepare_threshold": 2 if prepare else None,
            "connect_timeout": 5,
            "application_name": name,
        },
    )


def _check_idle(after_s: float) -> Callable[[AsyncConnection[TupleRow]], Awaitable[None]]:
    checked_at: WeakKeyDictionary[AsyncConnection[TupleRow], float] = WeakKeyDictionary()

    async def check(connection: AsyncConnection[TupleRow]) -> None:
        now = time.monotonic()
        if now - checked_at.get(connection, -after_s) >= after_s:
            await AsyncConnectionPool.check_connection(connection)
            checked_at[connection] = now

    return check
