"""The database as a scheduled function reaches it: one connection for a call, through RDS Proxy."""

from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.db import logins
from sandfleet.shared.settings import Settings

_CONNECT_S = 5


async def connect(settings: Settings, name: str) -> AsyncConnection[Any]:
    """A connection in autocommit mode; ``name`` stands for the function in PostgreSQL's own views.

    It prepares no statements, for which RDS Proxy would pin its session. Raises psycopg.OperationalError.
    """
    logins.refresh(settings)
    return await AsyncConnection.connect(
        settings.database_url,
        autocommit=True,
        connect_timeout=_CONNECT_S,
        prepare_threshold=None,
        application_name=name,
    )
