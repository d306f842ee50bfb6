"""The executor's side: order, fences, bounds, and what happens while a server is away."""

import asyncio
from collections.abc import Sequence

import pytest

from sandfleet.fleet.executor.publisher import Publisher
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence
from sandfleet.shared.streams.append import Entry, Outcome
from sandfleet.shared.streams.entry import decode, stream_key
from tests.streams.wire import open_wire
from tests.streams.world import World, open_world
from tests.waiting import eventually


async def in_redis(world: World, fence: Fence) -> list[tuple[str, str]]:
    """(id, event) of all that a run's stream holds."""
    entries = await world.redis.xrange(stream_key(fence.key.run_id))
    return [
        (str(event.id), event.event)
        for entry_id, fields in entries
        for event in decode(entry_id, fields[b"e"])
    ]


async def test_only_what_must_not_be_lost_is_journalled(world: World) -> None:
    stream = await world.start()
    stream.emit("messages", b"1", journalled=False)
    stream.emit("updates", b"1", journalled=True)
    await stream.drain()
    assert await world.journal(stream.fence.key) == [((1, 0), "metadata"), ((1, 2), "updates")]
    assert await in_redis(world, stream.fence) == [
        ("1-0", "metadata"),
        ("1-1", "messages"),
        ("1-2", "updates"),
    ]


async def test_nothing_is_shown_before_it_is_journalled(database: str, redis_url: str) -> None:
    """While PostgreSQL is away a journalled event, and what follows it in its run, stays away from Redis; other runs go
    on. Broken by appending first, or by one run's commit holding up all."""
    async with (
        open_wire(database) as (wire, wired_url),
        open_world(database, redis_url, writer_url=wired_url) as world,
    ):
        stream, other = await world.start(), await world.start()
        await asyncio.gather(stream.drain(), other.drain())
        await wire.cut()
        stream.emit("updates", b"1", journalled=True)
        stream.emit("messages", b"1", journalled=False)
        other.emit("messages", b"1", journalled=False)
        await other.drain()
        assert await in_redis(world, other.fence) == [("1-0", "metadata"), ("1-1", "messages")]
        assert await in_redis(world, stream.fence) == [("1-0", "metadata")]
        await wire.mend()
        await stream.drain()
        assert await world.journal(stream.fence.key) == [((1, 0), "metadata"), ((1, 1), "updates")]
        assert await in_redis(world, stream.fence) == [
            ("1-0", "metadata"),
            ("1-1", "updates"),
            ("1-2", "messages"),
        ]


async def test_a_superseded_attempt_falls_silent_at_its_next_journalled_event(world: World) -> None:
    """The fence of the journal. Broken by ignoring the refusal."""
    zombie = await world.start()
    await zombie.drain()
    successor = await world.claim(zombie.fence.key)
    zombie.emit("updates", b"1", journalled=True)
    await zombie.drain()
    assert zombie.superseded.is_set()
    zombie.emit("messages", b"1", journalled=False)
    await zombie.drain()
    await successor.drain()
    assert await world.journal(zombie.fence.key) == [((1, 0), "metadata"), ((2, 0), "metadata")]
    assert await in_redis(world, zombie.fence) == [("1-0", "metadata"), ("2-0", "metadata")]


async def test_a_superseded_attempt_falls_silent_at_its_next_token_delta(world: World) -> None:
    """The fence of Redis: nothing is journalled here. Broken by taking a refused id for a repeated one."""
    zombie = await world.start()
    await zombie.drain()
    successor = await world.claim(zombie.fence.key)
    await successor.drain()
    zombie.emit("messages", b"1", journalled=False)
    await zombie.drain()
    assert zombie.superseded.is_set()


async def test_a_superseded_attempt_cannot_make_the_stream_anew(world: World) -> None:
    """Redis lost its fence with the key, so PostgreSQL is asked. Broken by making the stream without asking."""
    zombie = await world.start()
    await zombie.drain()
    await world.cancel(zombie.fence.key)
    await world.lose_redis()
    zombie.emit("messages", b"1", journalled=False)
    await zombie.drain()
    assert zombie.superseded.is_set()
    assert await in_redis(world, zombie.fence) == []


async def test_a_superseded_attempt_cannot_make_its_successors_stream(world: World) -> None:
    """The run is running, but another has it. Broken by asking PostgreSQL only whether the run goes on."""
    zombie = await world.start()
    await zombie.drain()
    successor = await world.claim(zombie.fence.key)
    await successor.drain()
    await world.lose_redis()
    zombie.emit("messages", b"1", journalled=False)
    await zombie.drain()
    assert zombie.superseded.is_set()
    assert await in_redis(world, zombie.fence) == []


async def test_a_run_that_is_over_makes_no_stream_anew(world: World) -> None:
    """Nothing follows the end. Broken by asking PostgreSQL only for the attempt: a run that its executor has ended has it
    still."""
    stream = await world.start()
    await world.finish(stream)
    await world.lose_redis()
    stream.emit("messages", b"1", journalled=False)
    await stream.drain()
    assert stream.superseded.is_set()
    assert await in_redis(world, stream.fence) == []


async def test_the_owner_makes_the_stream_anew(world: World) -> None:
    """Redis was emptied in the middle of a run. Broken by giving up on a missing stream."""
    stream = await world.start()
    await stream.drain()
    await world.lose_redis()
    stream.emit("messages", b"1", journalled=False)
    await stream.drain()
    assert await in_redis(world, stream.fence) == [("1-1", "messages")]
    assert not stream.superseded.is_set()


async def test_token_deltas_over_the_bound_are_dropped_together_and_leave_a_visible_hole(
    world: World,
) -> None:
    """Nothing is flushed while the loop is held, so the buffer fills. Broken by an unbounded buffer, or by numbering what
    is left: the hole would be invisible."""
    publisher = Publisher(world.writer, world.redis, world.pool, world.settings, buffer_events=10)
    await publisher.start()
    owner = await world.start()
    await owner.drain()
    stream = publisher.open(owner.fence, None)
    stream._next = 1  # goes on where `owner` was
    stream._buffer.clear()
    for n in range(1, 40):
        stream.emit("updates" if n == 5 else "messages", b"1", journalled=n == 5)
        assert len(stream._buffer) <= 11
    await stream.drain()
    await publisher.aclose()
    shown = [seq for seq, _ in await in_redis(world, stream.fence)]
    assert shown[:2] == ["1-0", "1-5"]
    assert shown[-1] == "1-39"
    assert stream.dropped == 39 - (len(shown) - 1)


async def test_bytes_are_bounded_too(world: World) -> None:
    publisher = Publisher(world.writer, world.redis, world.pool, world.settings, buffer_bytes=1000)
    stream = publisher.open((await world.start()).fence, None)
    for _ in range(100):
        stream.emit("messages", b"x" * 300, journalled=False)
        assert sum(len(b.data) for b in stream._buffer if b.event == "messages") <= 1000


async def test_while_redis_is_away_events_are_journalled_and_nothing_is_kept(
    database: str, redis_url: str
) -> None:
    """Broken by retrying the flush until Redis is back: `drain` would hang, and the buffer grow."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, publisher_url=url) as world,
    ):
        stream = await world.start()
        await stream.drain()
        await wire.cut()
        for n in range(1, 201):
            stream.emit("messages", b"1", journalled=False)
            if n % 100 == 0:
                stream.emit("updates", b"1", journalled=True)
            await stream.drain()
        assert [i for i, _ in await world.journal(stream.fence.key)] == [(1, 0), (1, 101), (1, 202)]
        assert not stream._buffer
        assert not stream._flight
        await wire.mend()

        async def a_token_gets_through() -> bool:
            stream.emit("messages", b"1", journalled=False)
            await stream.drain()
            return len(await in_redis(world, stream.fence)) > 1

        await eventually(a_token_gets_through)


@pytest.mark.parametrize("replies_only", [False, True], ids=["request lost", "reply lost"])
async def test_a_connection_that_breaks_during_a_flush_costs_no_token_delta(
    database: str, redis_url: str, replies_only: bool
) -> None:
    """The flush is sent again; when it had arrived, Redis says that it is there. Broken by giving up at the first error,
    or by taking a repeated id for a successor's."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, publisher_url=url) as world,
    ):
        stream = await world.start()
        await stream.drain()
        wire.silence(replies_only=replies_only)
        stream.emit("messages", b"1", journalled=False)
        sent = wire.bytes_read
        await eventually(lambda: wire.bytes_read > sent)
        await wire.drop()
        await wire.mend()
        stream.emit("messages", b"1", journalled=False)
        await stream.drain()
        assert [i for i, _ in await in_redis(world, stream.fence)] == ["1-0", "1-1", "1-2"]


async def test_the_first_events_go_out_at_once_and_later_deltas_are_gathered(
    database: str, redis_url: str
) -> None:
    """With a pause of an hour: what is not at once does not come. Broken by holding back the first token delta, or the first
    event of all."""
    async with open_world(database, redis_url, flush_pause_ms=3_600_000) as world:
        stream = await world.start()
        await eventually(lambda: in_redis(world, stream.fence))
        stream.emit("messages", b"1", journalled=False)

        async def two() -> bool:
            return len(await in_redis(world, stream.fence)) == 2

        await eventually(two)
        other = await world.start()
        await eventually(lambda: in_redis(world, other.fence), what="the first event of another run")
        for _ in range(50):
            stream.emit("messages", b"1", journalled=False)
        assert stream._buffer
        await stream.drain()
        assert await world.redis.xlen(stream_key(stream.fence.key.run_id)) == 3


async def test_a_stream_that_is_gone_while_postgresql_is_away_holds_nothing_up(
    database: str, redis_url: str
) -> None:
    """Nobody can say whose run it is, so the deltas are given up. Broken by an error that ends the look: `drain` would hang."""
    async with (
        open_wire(database) as (wire, wired_url),
        open_world(database, redis_url) as world,
        open_pool(wired_url, 1) as pool,
    ):
        pool.timeout = 0.1
        publisher = Publisher(world.writer, world.redis, pool, world.settings)
        await publisher.start()
        owner = await world.start()
        await owner.drain()
        stream = publisher.open(owner.fence, None)
        stream._next = 1  # goes on where `owner` was
        stream._buffer.clear()
        await wire.cut()
        await world.lose_redis()
        stream.emit("messages", b"1", journalled=False)
        async with asyncio.timeout(60):
            await stream.drain()
        assert not stream.superseded.is_set()
        await wire.mend()
        pool.timeout = 60
        stream.emit("messages", b"1", journalled=False)
        await stream.drain()
        assert await in_redis(world, stream.fence) == [("1-2", "messages")]
        await publisher.aclose()


async def test_an_error_nobody_thought_of_costs_one_flush(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One task appends for all runs. Broken by letting the error end it: no run would be seen from then on."""
    stream = await world.start()
    await stream.drain()
    appending = world.publisher._appender.append
    errors = [ValueError("nobody thought of this")]

    async def append(entries: Sequence[Entry]) -> list[Outcome]:
        if errors:
            raise errors.pop()
        return await appending(entries)

    monkeypatch.setattr(world.publisher._appender, "append", append)
    for _ in range(2):
        stream.emit("messages", b"1", journalled=False)
        async with asyncio.timeout(60):
            await stream.drain()
    assert await in_redis(world, stream.fence) == [("1-0", "metadata"), ("1-2", "messages")]
    assert "appending to streams" in caplog.text


async def test_one_flush_carries_many_runs_in_one_call(world: World) -> None:
    """Broken by a call per run: the server counts the script's calls."""
    streams = [await world.start() for _ in range(50)]
    await asyncio.gather(*(stream.drain() for stream in streams))
    before = (await world.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    for stream in streams:
        stream._first_token = False
        stream.emit("messages", b"1", journalled=False)
    await asyncio.gather(*(stream.drain() for stream in streams))
    after = (await world.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before <= 2


async def test_closing_flushes_what_is_buffered(database: str, redis_url: str) -> None:
    async with open_world(database, redis_url, flush_pause_ms=3_600_000) as world:
        stream = await world.start()
        for _ in range(3):
            stream.emit("messages", b"1", journalled=False)
        stream.emit("updates", b"1", journalled=True)
        await world.publisher.aclose()
        assert len(await in_redis(world, stream.fence)) == 5


@pytest.mark.parametrize("name", ["updates|a\0b:1", "updates|\ud800:1", "updates|日本:1"])
async def test_a_nodes_name_may_hold_anything(world: World, name: str) -> None:
    """PostgreSQL cannot hold U+0000, and UTF-8 no lone surrogate. Broken by handing names through."""
    stream = await world.start()
    stream.emit(name, b"1", journalled=True)
    await stream.drain()
    (_, (event_id, event)) = await world.journal(stream.fence.key)
    assert event_id == (1, 1)
    assert event.startswith("updates|")
    assert stream.dropped == 0


async def test_an_event_that_postgresql_refuses_is_a_hole_and_not_the_end(world: World) -> None:
    """Broken by showing it although it is not journalled, or by stopping the run's stream."""
    stream = await world.start()
    await stream.drain()
    stream.emit("updates", b"\xff\0", journalled=True)
    await stream.drain()
    stream.emit("messages", b"1", journalled=False)
    await stream.drain()
    assert not stream.superseded.is_set()
    client = world.follow(stream.fence.key)
    await world.finish(stream)
    assert [e.event for e in await client.end()] == ["metadata", "resync", "messages", "end"]
