"""Connection pools. Autocommit: a statement is a transaction unless a block says otherwise."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from weakref import WeakKeyDictionary

from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

from sandfleet.shared.db.vanished import KEEPALIVES, answered_within

Pool = AsyncConnectionPool[AsyncConnection[TupleRow]]

_IDLE_TRANSACTION_MS = 5_000
"""A process that freezes within a transaction holds its locks no longer than this: less than a lease."""

_CHECK_LIMIT_S = 2.0
_RECONNECT_FOR_S = 1.0


class _ImpatientPool(Pool):
    """A pool whose blocks lose their connection after ``limit_s``; their statements raise OperationalError then."""

    limit_s = 0.0

    @asynccontextmanager
    async def connection(self, timeout: float | None = None) -> AsyncIterator[AsyncConnection[TupleRow]]:
        async with super().connection(timeout) as connection:
            with answered_within(connection, self.limit_s):
                yield connection


def open_pool(
    database_url: str,
    max_size: int,
    *,
    min_size: int = 1,
    prepare: bool = True,
    check_after_s: float = 0.0,
    limit_s: float | None = None,
    name: str = "sandfleet",
) -> Pool:
    """A pool that is still closed; ``await pool.open()`` before use.

    Connections are checked when they are handed out, because a Lambda is frozen between requests and a server may have
    been restarted. Those that passed a check within ``check_after_s`` are not checked again, which saves a round trip
    per use; after a restart of the server each of them may fail once. ``prepare=False`` is for RDS Proxy, which pins a
    session that prepares statements or has options of its own. With ``limit_s`` a block that holds a connection for
    longer loses it, and fails with OperationalError; without, it waits for a server that hangs, until that answers or its
    machine has vanished.
    """
    kind = Pool if limit_s is None else _ImpatientPool
    pool = kind(
        database_url,
        min_size=min_size,
        max_size=max_size,
        open=False,
        check=_check_idle(check_after_s, None if limit_s is None else min(limit_s, _CHECK_LIMIT_S)),
        timeout=10.0,
        max_idle=300.0,
        name=name,
        # The pool doubles its pauses between attempts to connect. Giving up early and asking it to grow anew makes it try
        # once or twice a second, so that it is back soon after the server.
        reconnect_timeout=_RECONNECT_FOR_S,
        reconnect_failed=_grow_again,
        kwargs={
            **(
                {"options": f"-c idle_in_transaction_session_timeout={_IDLE_TRANSACTION_MS}"}
                if prepare
                else {}
            ),
            "autocommit": True,
            "prepare_threshold": 2 if prepare else None,
            "connect_timeout": 5,
            "application_name": name,
            **KEEPALIVES,
        },
    )
    if isinstance(pool, _ImpatientPool) and limit_s is not None:
        pool.limit_s = limit_s
    return pool


async def _grow_again(pool: Pool) -> None:
    if not pool.closed:
        await pool.check()


def _check_idle(
    after_s: float, limit_s: float | None
) -> Callable[[AsyncConnection[TupleRow]], Awaitable[None]]:
    checked_at: WeakKeyDictionary[AsyncConnection[TupleRow], float] = WeakKeyDictionary()

    async def check(connection: AsyncConnection[TupleRow]) -> None:
        now = time.monotonic()
        if now - checked_at.get(connection, -after_s) >= after_s:
            with nullcontext() if limit_s is None else answered_within(connection, limit_s):
                await AsyncConnectionPool.check_connection(connection)
            checked_at[connection] = now

    return check
