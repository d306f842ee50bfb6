"""The host's word with PostgreSQL: registration, the database's clock, and which runs are over."""

import asyncio
import logging
from contextlib import suppress
from typing import LiteralString

import psycopg

from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.registry import Registry
from sandfleet.shared.ids import RunKey

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 10.0

_BEAT: LiteralString = """
    insert into hosts (host_id, instance, address, backend, room, sandboxes, registered_at, heartbeat_at)
    values (%s, %s, %s, %s, %s, %s, clock_timestamp(), clock_timestamp())
    on conflict (host_id) do update set
        instance = excluded.instance, address = excluded.address, backend = excluded.backend, room = excluded.room,
        sandboxes = excluded.sandboxes, heartbeat_at = excluded.heartbeat_at
    returning extract(epoch from clock_timestamp())::float8
"""
_OVER: LiteralString = """
    select held.tenant, held.user_id, held.run_id
    from unnest(%s::text[], %s::text[], %s::uuid[]) as held (tenant, user_id, run_id)
    left join runs using (tenant, user_id, run_id)
    where runs.status is null or runs.status in ('success', 'error', 'timeout', 'interrupted')
"""


class Heartbeat:
    """Beats every 2 s. Without PostgreSQL nothing is reaped but sandboxes beyond their lifetime."""

    def __init__(
        self,
        database_url: str,
        registry: Registry,
        clock: DatabaseClock,
        *,
        host_id: str,
        instance: str,
        address: str,
        backend: str,
    ) -> None:
        self._database_url = database_url
        self._registry = registry
        self._clock = clock
        self._host = (host_id, instance, address, backend)
        self._connection: psycopg.AsyncConnection | None = None
        self._silent = False

    async def run(self) -> None:
        """Beat until cancelled; a lost connection is made again at the next beat."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    over = await self._beat()
                if self._silent:
                    self._silent = False
                    logger.info("PostgreSQL answers again")
                for key in over:
                    self._registry.dismiss(key)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if not self._silent:
                    self._silent = True
                    logger.warning("PostgreSQL does not answer", extra={"error": type(error).__name__})
                await self._disconnect()
            await asyncio.sleep(PERIOD_S)

    async def _beat(self) -> list[RunKey]:
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._database_url, autocommit=True, connect_timeout=5, application_name="sandfleet-host"
            )
        asked_at = self._clock.local()
        values = (*self._host, self._registry.room(), len(self._registry))
        row = await (await self._connection.execute(_BEAT, values)).fetchone()
        assert row is not None
        self._clock.heard(row[0], asked_at, self._clock.local())
        keys = self._registry.keys()
        if not keys:
            return []
        columns = ([k.tenant for k in keys], [k.user_id for k in keys], [k.run_id for k in keys])
        rows = await (await self._connection.execute(_OVER, columns)).fetchall()
        return [RunKey(*row) for row in rows]

    async def deregister(self) -> None:
        """Take the host off the list at a clean stop, if PostgreSQL answers."""
        with suppress(psycopg.Error, OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                if self._connection is not None and not self._connection.closed:
                    await self._connection.execute("delete from hosts where host_id = %s", (self._host[0],))
        await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
