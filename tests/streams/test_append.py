"""Appending to the streams of many runs in one call."""

import pytest
from redis.asyncio import Redis

from sandfleet.shared.ids import new_id
from sandfleet.shared.streams.append import Appender, Entry, Outcome
from sandfleet.shared.streams.entry import EventId, encode, stream_key
from tests.streams.world import World

PAYLOAD = encode([(0, "messages", b"1")])


@pytest.fixture
def appender(world: World) -> Appender:
    return Appender(world.redis, ttl_s=100, max_entries=100)


def entry(run_id: object, attempt: int, seq: int, *, create: bool = False) -> Entry:
    return Entry(run_id, EventId(attempt, seq), PAYLOAD, create)  # type: ignore[arg-type]


async def test_each_entry_has_its_own_outcome(appender: Appender) -> None:
    """One call for five runs: the refusal of one does not touch the others."""
    new, gone, repeated, behind, good = (new_id() for _ in range(5))
    await appender.append([entry(run, 2, 3, create=True) for run in (repeated, behind, good)])
    outcomes = await appender.append(
        [
            entry(new, 1, 0, create=True),
            entry(gone, 1, 4),
            entry(repeated, 2, 3),
            entry(behind, 1, 9),
            entry(good, 2, 4),
        ]
    )
    assert outcomes == [Outcome.OK, Outcome.MISSING, Outcome.PRESENT, Outcome.SUPERSEDED, Outcome.OK]


async def test_a_zombie_cannot_write_behind_its_successor(world: World, appender: Appender) -> None:
    """XADD itself is the fence. Broken by letting Redis choose ids."""
    run = new_id()
    await appender.append([entry(run, 2, 0, create=True)])
    assert await appender.append([entry(run, 1, 50, create=True)]) == [Outcome.SUPERSEDED]
    assert [i for i, _ in await world.redis.xrange(stream_key(run))] == [b"2-0"]


async def test_a_stream_that_is_gone_is_not_made_by_whoever_comes(world: World, appender: Appender) -> None:
    """Broken by leaving NOMKSTREAM out: a zombie would open a stream of its own after Redis was emptied."""
    run = new_id()
    assert await appender.append([entry(run, 1, 7)]) == [Outcome.MISSING]
    assert not await world.redis.exists(stream_key(run))


async def test_a_stream_lives_for_its_time_after_the_last_entry(world: World, appender: Appender) -> None:
    """Broken by setting EXPIRE at the beginning only: the time would run from the first entry."""
    run = new_id()
    await appender.append([entry(run, 1, 0, create=True)])
    await world.redis.expire(stream_key(run), 5)
    await appender.append([entry(run, 1, 1)])
    assert 90 < await world.redis.ttl(stream_key(run)) <= 100


async def test_a_stream_keeps_about_its_newest_entries(world: World, appender: Appender) -> None:
    """Redis trims whole nodes of a hundred, hence "about"."""
    run = new_id()
    for seq in range(350):
        await appender.append([entry(run, 1, seq, create=seq == 0)])
    assert 100 <= await world.redis.xlen(stream_key(run)) <= 200


async def test_the_script_is_loaded_again_where_redis_forgot_it(world: World, appender: Appender) -> None:
    """As after a restart or a failover, in the middle of a run. Broken by EVALSHA alone, whoever loaded the script first."""
    assert await appender.append([entry(new_id(), 1, 0, create=True)]) == [Outcome.OK]
    await world.redis.script_flush()
    assert await appender.append([entry(new_id(), 1, 0, create=True)]) == [Outcome.OK]


async def test_more_entries_than_one_call_takes(appender: Appender) -> None:
    runs = [new_id() for _ in range(150)]
    assert await appender.append([entry(run, 1, 0, create=True) for run in runs]) == [Outcome.OK] * 150


async def test_out_of_memory_is_an_outcome_and_no_exception(redis_url: str, appender: Appender) -> None:
    """Redis answers, so it is not away; but the entry is not there. Broken by reading any error as a refused id."""
    run = new_id()
    await appender.append([entry(run, 1, 0, create=True)])
    async with Redis.from_url(redis_url) as admin:
        try:
            await admin.config_set("maxmemory", "1")
            assert await appender.append([entry(run, 1, 1)]) == [Outcome.REFUSED]
        finally:
            await admin.config_set("maxmemory", "0")
