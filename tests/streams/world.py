"""Runs that a test claims, takes over and ends at will, on real PostgreSQL and Redis, with readers that are cut off."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from uuid import UUID

from redis.asyncio import Redis

from sandfleet.fleet.executor import publisher as publisher_module
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.publisher import Publisher, RunStream
from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Fence, RunKey, new_id
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S
from sandfleet.shared.store.claims import Ending, finish
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.streams import hub as hub_module
from sandfleet.shared.streams.announce import announce_ends
from sandfleet.shared.streams.entry import EventId, stream_key
from sandfleet.shared.streams.follow import StreamEvent, follow
from sandfleet.shared.streams.hub import Hub

TENANT, USER = "acme", "ada"


@dataclass
class World:
    pool: Pool
    redis: Redis
    redis_url: str
    database_url: str
    settings: Settings
    writer: FencedWriter
    publisher: Publisher
    hub: Hub
    streams: list[RunStream] = field(default_factory=list)

    async def run(self, thread_id: UUID | None = None) -> RunKey:
        """A new run that is ready to be claimed, on a new thread unless one is named."""
        key = RunKey(TENANT, USER, new_id())
        async with self.pool.connection() as connection:
            await connection.execute(
                "insert into tenants (tenant, max_in_flight, max_queued) values (%s, 1000000, 1000000) on conflict do nothing",
                (TENANT,),
            )
            await connection.execute(
                "select * from submit_run(%s, %s, %s, %s, true, false, %s, 'graph', 'run', 'default', 1::smallint,"
                " 'enqueue', '{}', '{}', '{}', 0, 60, null, null, null, 60)",
                (TENANT, USER, key.run_id, thread_id or new_id(), new_id()),
            )
        return key

    async def claim(self, key: RunKey) -> RunStream:
        """The next attempt takes the run; whoever had it goes on as a zombie."""
        async with self.pool.connection() as connection:
            cursor = await connection.execute(
                "update runs set attempt = attempt + 1, status = 'running', lease_owner = 'me',"
                " lease_expires_at = clock_timestamp() + interval '1 minute', started_at = clock_timestamp()"
                " where tenant = %s and user_id = %s and run_id = %s and status in ('pending', 'running') returning attempt",
                tuple(key),
            )
            row = await cursor.fetchone()
        assert row is not None
        return self.publisher.open(Fence(key, row[0]), None)

    async def start(self) -> RunStream:
        """A run under its first attempt."""
        return await self.claim(await self.run())

    async def finish(self, stream: RunStream, publish: bool = True) -> bool:
        """End a run as its executor does; ``publish=False`` dies before it tells Redis."""
        await stream.drain()
        seq = stream.reserve(1)
        async with self.pool.connection() as connection:
            mine, _ = await finish(
                connection, stream.fence, Ending("success", json.dumps([[seq, "end", "null"]]))
            )
        if mine and publish:
            stream.append_committed([(seq, "end", b"null")])
            await stream.drain()
        return mine

    async def cancel(self, key: RunKey, *, error: str | None = None, announce: bool = False) -> None:
        """End a run as the API and the sweep do: by the next attempt. Without ``announce`` they die before they tell
        Redis."""
        async with self.pool.connection() as connection:
            cursor = await connection.execute(
                "select o_attempt from end_run(%s, %s, %s, 'interrupted', %s::json, %s) where outcome = 'done'",
                (*key, error, TEMPORARY_KEEP_S),
            )
            rows = await cursor.fetchall()
        if announce and rows:
            await announce_ends(self.redis, self.settings, [EndedRun(key.run_id, rows[0][0], error)])

    async def erase(self, key: RunKey) -> None:
        async with self.pool.connection() as connection:
            await connection.execute("select erase_run(%s, %s, %s)", tuple(key))

    async def journal(self, key: RunKey) -> list[tuple[EventId, str]]:
        async with self.pool.connection() as connection:
            cursor = await connection.execute(
                "select attempt, seq, event from journal where tenant = %s and user_id = %s and run_id = %s"
                " order by attempt, seq",
                tuple(key),
            )
            return [(EventId(a, s), event) for a, s, event in await cursor.fetchall()]

    async def state(self, key: RunKey) -> str:
        async with self.pool.connection() as connection:
            cursor = await connection.execute(
                "select status from runs where tenant = %s and user_id = %s and run_id = %s", tuple(key)
            )
            row = await cursor.fetchone()
        if row is None:
            raise NotFound("There is no such run.")
        return json.dumps({"run_id": str(key.run_id), "status": row[0], "values": {}})

    def follow(self, key: RunKey, cursor: str | None = None, **options: Any) -> "Client":
        return Client(self, key, cursor, options)

    async def lose_stream(self, key: RunKey) -> None:
        await self.redis.delete(stream_key(key.run_id))

    async def lose_redis(self) -> None:
        await self.redis.flushdb()


class Client:
    """A client of one run's stream, which reads in the background until the stream ends or it is cut off."""

    def __init__(self, world: World, key: RunKey, cursor: str | None, options: dict[str, Any]) -> None:
        self.events: list[StreamEvent] = []
        self.hold: asyncio.Event | None = options.pop("hold", None)
        """A slow client: it takes its first event, and the next ones when this is set."""
        self._events = follow(world.hub, key, cursor, **{"state": world.state, **options})
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                self.events.append(event)
                if self.hold is not None:
                    await self.hold.wait()

    @property
    def ended(self) -> bool:
        return self._task.done()

    @property
    def ids(self) -> list[str | None]:
        return [event.id for event in self.events]

    @property
    def names(self) -> list[str]:
        return [event.event for event in self.events]

    @property
    def last_id(self) -> str | None:
        return next((event.id for event in reversed(self.events) if event.id), None)

    async def end(self, deadline_s: float = 60.0) -> list[StreamEvent]:
        """All events, once the stream has ended."""
        async with asyncio.timeout(deadline_s):
            await asyncio.shield(self._task)
        return self.events

    async def cut(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def unhurried() -> Iterator[None]:
    """Redis counts as away only when it refuses: a loaded machine may answer later than clients of a service should wait,
    and the token deltas that are given up then are no fault."""
    with (
        patch.object(hub_module, "_COMMAND_TIMEOUT_S", 600.0),
        patch.object(publisher_module, "_REDIS_TIMEOUT_S", 600.0),
    ):
        yield


@asynccontextmanager
async def open_world(
    database_url: str,
    redis_url: str,
    *,
    publisher_url: str | None = None,
    hub_url: str | None = None,
    writer_url: str | None = None,
    flush_pause_ms: float = 2.0,
    **hub_options: Any,
) -> AsyncIterator[World]:
    """A world; the publisher and the hub may reach Redis, the writer PostgreSQL, by ways of their own."""
    settings = Settings(database_url=database_url, redis_url=redis_url, flush_pause_ms=flush_pause_ms)
    pool = open_pool(database_url, 8)
    await pool.open()
    redis = Redis.from_url(redis_url)
    writer = FencedWriter(writer_url or database_url)
    await writer.start()
    publisher_redis = Redis.from_url(publisher_url or redis_url)
    publisher = Publisher(writer, publisher_redis, pool, settings)
    await publisher.start()
    hub = Hub(hub_url or redis_url, pool, **{"poll_every_s": 0.2, "grace_s": 0.1, **hub_options})
    hub.start()
    try:
        yield World(pool, redis, redis_url, database_url, settings, writer, publisher, hub)
    finally:
        await hub.aclose()
        await publisher.aclose()
        await writer.stop()
        await publisher_redis.aclose()
        await redis.aclose()
        await pool.close()
