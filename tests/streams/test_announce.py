"""Watchers of a run that another than its executor has ended learn of it from Redis, not by the next comparison."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from sandfleet.shared.ids import new_id
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.streams.announce import announce_ends
from tests.streams.wire import open_wire
from tests.streams.world import World, open_world
from tests.waiting import eventually

ERROR = '{"error": "RunTimeout", "message": "late"}'


@pytest.fixture
async def world(database: str, redis_url: str) -> AsyncIterator[World]:
    """A world whose readers never compare with PostgreSQL."""
    async with open_world(database, redis_url, poll_every_s=3600.0) as opened:
        yield opened


async def test_the_end_of_a_run_that_nobody_began_is_announced(world: World) -> None:
    """Red when the entry may not make the stream: nobody has written to it."""
    key = await world.run()
    client = world.follow(key)
    await world.cancel(key, announce=True)
    await client.end(60)
    assert (client.names, client.ids) == (["end"], ["1-0"])


async def test_the_end_of_a_run_whose_executor_is_stuck_is_announced_with_its_error(world: World) -> None:
    """And what that executor still sends is refused. Red when the end is appended under the old attempt."""
    stuck = await world.start()
    await stuck.drain()
    client = world.follow(stuck.fence.key)
    await eventually(lambda: client.names == ["metadata"])
    await world.cancel(stuck.fence.key, error=ERROR, announce=True)
    await client.end(60)
    stuck.emit("messages", b"1", journalled=False)
    await stuck.drain()
    assert stuck.superseded.is_set()
    assert (client.names, client.ids) == (["metadata", "error", "end"], ["1-0", "2-0", "2-1"])
    assert await world.journal(stuck.fence.key) == [((1, 0), "metadata"), ((2, 0), "error"), ((2, 1), "end")]


async def test_what_only_postgresql_has_comes_before_the_announced_end(world: World) -> None:
    """Red when a reader takes the announced end without a look into the journal: its executor died between the two."""
    stream = await world.start()
    stream.emit("updates", b"1", journalled=True)
    await stream.drain()
    await world.lose_redis()
    client = world.follow(stream.fence.key)
    await world.cancel(stream.fence.key, announce=True)
    await client.end(60)
    assert client.names == ["metadata", "updates", "end"]


async def test_without_redis_nothing_fails(database: str, redis_url: str) -> None:
    """Red when an error of Redis gets to whoever ended the run, which is done."""
    async with open_wire(redis_url) as (wire, _), open_world(database, redis_url) as world:
        await wire.cut()
        world.redis.connection_pool.connection_kwargs["port"] = wire.port
        await world.redis.connection_pool.disconnect()
        await world.cancel(await world.run(), announce=True)
        await announce_ends(world.redis, world.settings, [])


async def test_a_redis_that_does_not_answer_holds_up_nobody(database: str, redis_url: str) -> None:
    """Red when it is waited for: whoever ended the run would never come back."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url) as world,
        Redis.from_url(url) as redis,
    ):
        await redis.ping()
        wire.silence()
        async with asyncio.timeout(60):
            await announce_ends(redis, world.settings, [EndedRun(new_id(), 1, None)])
