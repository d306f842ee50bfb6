"""Connection pools. Autocommit: a statement is a transaction unless a block says otherwise."""

from psycopg import AsyncConnection
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool

Pool = AsyncConnectionPool[AsyncConnection[TupleRow]]


def open_pool(
    database_url: str, max_size: int, *, min_size: int = 1, prepare: bool = True, name: str = "sandfleet"
) -> Pool:
    """A pool that is still closed; ``await pool.open()`` before use.

    Connections are checked when they are handed out, because a Lambda is frozen between requests and a server may have
    been restarted. ``prepare=False`` is for RDS Proxy, which pins a session that prepares statements.
    """
    return AsyncConnectionPool(
        database_url,
        min_size=min_size,
        max_size=max_size,
        open=False,
        check=AsyncConnectionPool.check_connection,
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
