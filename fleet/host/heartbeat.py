"""The host's word with PostgreSQL: registration, the database's clock, and which sandboxes nobody owns any more."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import LiteralString, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from sandfleet.fleet.host.clock import DatabaseClock
from sandfleet.fleet.host.registry import Registry
from sandfleet.shared.ids import RunKey

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
_SHORTEST_S = 0.2
_ANSWER_TIMEOUT_S = 10.0
_FIRST_ANSWER_S = 5.0  # sandboxes wait for their host to come back

_BEAT: LiteralString = """
    insert into hosts (host_id, instance, address, remote, backend, room, sandboxes, memory, pids, most, memory_taken,
                       pids_taken, draining, templates, machine, folder, held, disk, disk_taken)
    values (%(host_id)s, %(instance)s, %(address)s, %(remote)s, %(backend)s, %(room)s, %(sandboxes)s, %(memory)s, %(pids)s,
            %(most)s, %(memory_taken)s, %(pids_taken)s, %(draining)s, %(templates)s, %(machine)s, %(folder)s, %(held)s,
            %(disk)s, %(disk_taken)s)
    on conflict (host_id) do update set
        instance = excluded.instance, address = excluded.address, remote = excluded.remote, backend = excluded.backend,
        room = excluded.room, sandboxes = excluded.sandboxes, memory = excluded.memory, pids = excluded.pids,
        most = excluded.most, memory_taken = excluded.memory_taken, pids_taken = excluded.pids_taken,
        draining = excluded.draining, templates = excluded.templates, machine = excluded.machine,
        folder = excluded.folder, held = excluded.held, disk = excluded.disk, disk_taken = excluded.disk_taken,
        heartbeat_at = clock_timestamp()
    returning extract(epoch from clock_timestamp())::float8, (select deployment_id::text from deployment)
"""
# Whose sandboxes nobody needs here: what is over, and what has gone on on another host while this one was silent.
_OVER: LiteralString = """
    select held.tenant, held.user_id, held.run_id
    from unnest(%(tenants)s::text[], %(users)s::text[], %(ids)s::uuid[]) as held (tenant, user_id, run_id)
    left join runs using (tenant, user_id, run_id)
    where (runs.status is null or runs.status in ('success', 'error', 'timeout', 'interrupted') or exists (
        select 1 from placements p where p.tenant = held.tenant and p.user_id = held.user_id and p.run_id = held.run_id
          and p.host_id <> %(own)s))
      and not exists (
        select 1 from sandboxes s join placements p on p.tenant = s.tenant and p.user_id = s.user_id and p.run_id = s.sandbox_id
        where s.tenant = held.tenant and s.user_id = held.user_id and s.sandbox_id = held.run_id
          and s.expires_at > clock_timestamp() and p.host_id = %(own)s)
"""


async def deployment_of(database_url: str) -> str | None:
    """Which deployment this is; None if PostgreSQL does not answer now."""
    with suppress(psycopg.Error, OSError, TimeoutError):
        async with (
            asyncio.timeout(_FIRST_ANSWER_S),
            await psycopg.AsyncConnection.connect(
                database_url, autocommit=True, application_name="sandfleet-host"
            ) as connection,
        ):
            cursor = await connection.execute("select deployment_id::text from deployment")
            row = await cursor.fetchone()
            return None if row is None else str(row[0])
    return None


class HostAbout(NamedTuple):
    """What does not change about a host. ``address`` is unix:PATH, ``remote`` http://HOST:PORT or None, ``folder`` that of
    its sandboxes on its ``machine``."""

    host_id: str
    instance: str
    address: str
    remote: str | None
    backend: str
    machine: str
    folder: str


class Heartbeat:
    """Beats every 2 s, and soon after sandboxes have gone, since somebody may wait for their room. Without PostgreSQL nothing is reaped but sandboxes beyond their lifetime."""

    def __init__(
        self,
        database_url: str,
        registry: Registry,
        clock: DatabaseClock,
        *,
        about: HostAbout,
    ) -> None:
        self._database_url = database_url
        self._registry = registry
        self._clock = clock
        self._about = about
        self._connection: psycopg.AsyncConnection | None = None
        self._silent = False
        self._steady_since: float | None = None  # monotonic

    def steady_s(self) -> float:
        """Seconds for which PostgreSQL has answered every beat; 0 before the first and while it does not."""
        return 0.0 if self._steady_since is None else time.monotonic() - self._steady_since

    async def run(self) -> None:
        """Beat until cancelled; a lost connection is made again at the next beat."""
        while True:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    over = await self._beat()
                if self._steady_since is None:
                    self._steady_since = time.monotonic()
                if self._silent:
                    self._silent = False
                    logger.info("PostgreSQL answers again")
                for key in over:
                    self._registry.dismiss(key)
            except (psycopg.Error, OSError, TimeoutError) as error:
                if not self._silent:
                    self._silent = True
                    logger.warning("PostgreSQL does not answer", extra={"error": type(error).__name__})
                self._steady_since = None
                await self._disconnect()
            await asyncio.sleep(_SHORTEST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S - _SHORTEST_S):
                    await self._registry.room_made.wait()

    async def _beat(self) -> list[RunKey]:
        if self._connection is None or self._connection.closed:
            self._connection = await psycopg.AsyncConnection.connect(
                self._database_url, autocommit=True, connect_timeout=5, application_name="sandfleet-host"
            )
        asked_at = self._clock.local()
        self._registry.room_made.clear()
        taken, most = self._registry.taken(), self._registry.most()
        values = {
            **self._about._asdict(),
            "room": self._registry.room(),
            "sandboxes": taken.sandboxes,
            "memory": most.memory,
            "pids": most.pids,
            "most": most.sandboxes,
            "memory_taken": taken.memory,
            "pids_taken": taken.pids,
            "disk": most.disk,
            "disk_taken": taken.disk,
            "draining": self._registry.draining,
            "templates": Jsonb(self._registry.offers()),
            "held": Jsonb([[k.tenant, k.user_id, str(k.run_id)] for k in self._registry.all_keys()]),
        }
        row = await (await self._connection.execute(_BEAT, values)).fetchone()
        assert row is not None
        self._clock.heard(row[0], asked_at, self._clock.local())
        self._registry.belong_to(row[1])
        keys = self._registry.keys()
        if not keys:
            return []
        held = {
            "tenants": [k.tenant for k in keys],
            "users": [k.user_id for k in keys],
            "ids": [k.run_id for k in keys],
            "own": self._about.host_id,
        }
        rows = await (await self._connection.execute(_OVER, held)).fetchall()
        return [RunKey(*row) for row in rows]

    async def deregister(self) -> None:
        """Take the host off the list at a clean stop, if PostgreSQL answers."""
        with suppress(psycopg.Error, OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                if self._connection is not None and not self._connection.closed:
                    await self._connection.execute(
                        "delete from hosts where host_id = %s", (self._about.host_id,)
                    )
        await self._disconnect()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                await connection.close()
