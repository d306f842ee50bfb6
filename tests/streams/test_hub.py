"""One reader for all clients of a process."""

import asyncio
import time

import pytest
from redis.asyncio import Redis

from sandfleet.shared.streams.entry import START, EventId, stream_key
from tests.streams.wire import open_wire
from tests.streams.world import Client, World, open_world, unhurried
from tests.waiting import eventually


async def test_two_hundred_clients_cost_two_connections(database: str, redis_url: str) -> None:
    """One that blocks and one for short commands. Half of the clients watch a run each, half the same one; a quarter
    comes late and catches up. Broken by reading per client."""
    with unhurried():  # whoever has given up waiting for an answer opens a connection anew
        await many_clients(database, redis_url)


async def many_clients(database: str, redis_url: str) -> None:
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, hub_url=url) as world,
    ):
        shared, *others = [await world.start() for _ in range(101)]
        early: list[Client] = [world.follow(stream.fence.key) for stream in others[:50]]
        early += [world.follow(shared.fence.key) for _ in range(100)]
        for stream in (shared, *others):
            for n in range(5):
                stream.emit("messages", b"%d" % n, journalled=False)
        await asyncio.gather(*(stream.drain() for stream in (shared, *others)))
        late = [world.follow(stream.fence.key) for stream in others[50:]]
        await eventually(lambda: all(len(client.events) == 6 for client in early + late))
        assert wire.open_connections <= 2
        assert wire.accepted <= 2
        for stream in (shared, *others):
            await world.finish(stream)
        for client in early + late:
            assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(7)]
        assert not world.hub._watched


async def test_a_new_client_does_not_wait_for_the_blocked_read(database: str, redis_url: str) -> None:
    """Broken by not waking the reader: the stream is read when the block time of 60 s is over."""
    async with open_world(database, redis_url, block_s=60, poll_every_s=60) as world:
        idle = world.follow((await world.start()).fence.key)
        await eventually(lambda: idle.events and world.hub._blocked)
        stream = await world.start()
        client = world.follow(stream.fence.key, fresh=True)
        await world.finish(stream)
        assert [e.id for e in await client.end()] == ["1-0", "1-1"]
        assert 0 < await world.redis.ttl(world.hub._wake_key) <= 60
        await idle.cut()


async def test_a_cursor_from_the_future_holds_nobody_else_up(database: str, redis_url: str) -> None:
    """Nor does one that lags: the first client of a run says where it is, and the next one is before that. Broken by
    reading on from the first one's cursor: the others would see token deltas with the next event that is journalled."""
    async with open_world(database, redis_url, block_s=60, poll_every_s=60) as world:
        stream = await world.start()
        await stream.drain()
        ahead = world.follow(stream.fence.key, "9-99")
        await eventually(lambda: world.hub._watched and world.hub._blocked)
        client = world.follow(stream.fence.key)
        await eventually(lambda: client.events)
        for n in range(3):
            stream.emit("messages", b"%d" % n, journalled=False)
        await eventually(lambda: len(client.events) == 4, what="the token deltas")
        assert ahead.events == []
        await world.finish(stream)
        assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(5)]
        await ahead.cut()


async def test_a_comparison_that_fails_is_not_the_last_one(
    database: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """PostgreSQL refuses it, for whatever reason, and the stream of a run has lost its end. Broken by a loop that ends
    with an error nobody thought of, without a word: streams would hang from then on."""
    async with open_world(database, redis_url) as world:
        stream = await world.start()
        client = world.follow(stream.fence.key)
        await eventually(lambda: client.events)
        async with world.pool.connection() as connection:
            await connection.execute("alter table journal rename to hidden")
        await eventually(
            lambda: "comparing streams with the journal" in caplog.text, what="a failed comparison"
        )
        async with world.pool.connection() as connection:
            await connection.execute("alter table hidden rename to journal")
        await world.finish(stream, publish=False)
        assert [e.event for e in await client.end()] == ["metadata", "end"]


async def test_a_quiet_stream_is_read_beyond_the_block_time(database: str, redis_url: str) -> None:
    """Nothing happens for several block times, which is no failure. Broken by a time limit below the block time."""
    async with open_world(database, redis_url, block_s=0.05) as world:
        stream = await world.start()
        client = world.follow(stream.fence.key)
        await eventually(lambda: client.events)
        quiet_until = time.monotonic() + 0.4
        await eventually(lambda: time.monotonic() > quiet_until)
        assert world.hub.redis_up
        await world.finish(stream)
        assert [e.id for e in await client.end()] == ["1-0", "1-1"]


async def test_a_slow_client_loses_its_buffer_and_no_event(database: str, redis_url: str) -> None:
    """It holds 50 events at most, or 900 bytes, while 600 pass, and is then served from Redis by its cursor. Broken by a
    buffer without either bound (the first assertions), or by not reading again (a `resync`)."""
    async with open_world(database, redis_url, buffer_events=50, buffer_bytes=900, poll_every_s=60) as world:
        stream = await world.start()
        await stream.drain()
        subscription = world.hub.subscribe(stream.fence.key, START)
        for n in range(600):
            stream.emit("messages", b"%d" % n, journalled=False)
            if n % 7 == 0:
                await stream.drain()
        await stream.drain()
        await eventually(lambda: world.hub._watched[stream.fence.key].position == (1, 600))
        assert subscription.lost
        assert subscription.take() == []
        subscription.close()

        large = world.hub.subscribe(stream.fence.key, EventId(1, 600))
        stream.emit("messages", b"x" * 1000, journalled=False)
        await stream.drain()
        await eventually(lambda: world.hub._watched[stream.fence.key].position == (1, 601))
        assert large.lost
        large.close()

        key = await world.run()
        slow = world.follow(key, hold=asyncio.Event(), fresh=True)
        stream = await world.claim(key)
        await eventually(lambda: slow.events)
        for n in range(600):
            stream.emit("messages", b"%d" % n, journalled=False)
            if n % 7 == 0:
                await stream.drain()
        await world.finish(stream)
        slow.hold.set()
        assert [e.id for e in await slow.end()] == [f"1-{n}" for n in range(602)]


async def test_with_redis_gone_from_the_start_clients_get_the_journal_and_the_end(
    database: str, redis_url: str
) -> None:
    """Both the executor's and the API's way to Redis is cut before anything begins. Broken by a publisher that waits for
    Redis, or by a reader that only looks there."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, hub_url=url, publisher_url=url) as world,
    ):
        await wire.cut()
        stream = await world.start()
        client = world.follow(stream.fence.key)
        for kind in "mtmtm":
            stream.emit("updates" if kind == "m" else "messages", b"1", journalled=kind == "m")
        await eventually(lambda: "updates" in client.names)
        await world.finish(stream)
        events = await client.end()
        assert [e.id for e in events if e.id] == ["1-0", "1-1", "1-3", "1-5", "1-6"]
        assert "resync" in client.names


async def test_when_redis_comes_back_token_deltas_flow_again(database: str, redis_url: str) -> None:
    """The hole of the outage is announced once, and nothing is told twice. Broken by a reader that gives up."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, hub_url=url, publisher_url=url) as world,
    ):
        stream = await world.start()
        client = world.follow(stream.fence.key)
        stream.emit("messages", b"1", journalled=False)
        await eventually(lambda: len(client.events) == 2)
        await wire.cut()
        stream.emit("messages", b"2", journalled=False)
        await stream.drain()
        await wire.mend()
        tokens = 0

        async def a_token_arrives() -> bool:
            nonlocal tokens
            tokens += 1
            stream.emit("messages", b"3", journalled=False)
            await stream.drain()
            return client.names[-1] == "messages" and client.names.count("messages") > 1

        await eventually(a_token_arrives)
        await world.finish(stream)
        await client.end()
        assert client.names.count("resync") == 1
        numbers = [int(i.split("-")[1]) for i in client.ids if i]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == 3 + tokens


async def test_a_silent_redis_is_noticed(database: str, redis_url: str) -> None:
    """The connections stay open and nothing gets through, as behind a broken firewall: a client still gets the journal
    and `end`. Broken by calls without a time limit."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, hub_url=url, publisher_url=url, block_s=0.1) as world,
    ):
        stream = await world.start()
        client = world.follow(stream.fence.key)
        await eventually(lambda: client.events)
        wire.silence()
        joining = world.follow(stream.fence.key, live_only=True)
        stream.emit("updates", b"1", journalled=True)
        await world.finish(stream)
        assert [e.id for e in await client.end()] == ["1-0", "1-1", "1-2"]
        assert (await joining.end())[-1].event == "end"
        await wire.mend()


async def test_a_connection_that_fell_silent_is_given_up(database: str, redis_url: str) -> None:
    """Token deltas come by another one. Broken by a read without a time limit: nobody would see any from then on."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, hub_url=url, block_s=0.1, poll_every_s=3600) as world,
    ):
        stream = await world.start()
        client = world.follow(stream.fence.key)
        await eventually(lambda: client.events)
        wire.strand()
        stream.emit("messages", b"1", journalled=False)
        await eventually(lambda: client.names == ["metadata", "messages"], what="the token delta")
        await world.finish(stream)
        await client.end()


async def test_a_client_that_is_ahead_keeps_no_journalled_event_from_the_others(
    database: str, redis_url: str
) -> None:
    """Redis has nothing, so the comparison with the journal alone brings it. Broken by comparing with the first client's
    place, or the last one's."""
    async with (
        open_wire(redis_url) as (wire, url),
        open_world(database, redis_url, publisher_url=url) as world,
    ):
        stream = await world.start()
        await stream.drain()
        ahead, client, further = (world.follow(stream.fence.key, at) for at in ("9-99", None, "8-88"))
        await eventually(
            lambda: client.events and len(world.hub._watched[stream.fence.key].subscriptions) == 3
        )
        await wire.cut()
        stream.emit("updates", b"1", journalled=True)
        await eventually(lambda: "updates" in client.names, what="the event that only the journal has")
        await world.finish(stream)
        for each in (ahead, client, further):
            assert (await each.end())[-1].event == "end"


async def test_a_client_that_comes_when_others_have_read_on_misses_nothing(
    database: str, redis_url: str
) -> None:
    """What it has not had does not come to it live any more. Broken by not reading it from Redis: a `resync`."""
    async with open_world(database, redis_url, poll_every_s=3600) as world:
        stream = await world.start()
        first = world.follow(stream.fence.key)
        for n in range(3):
            stream.emit("messages", b"%d" % n, journalled=False)
        await eventually(lambda: len(first.events) == 4)
        late = world.follow(stream.fence.key, fresh=True)
        await world.finish(stream)
        for client in (first, late):
            assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(5)]


async def test_an_entry_that_is_not_ours_costs_nobody_the_stream(world: World) -> None:
    """It is a hole as any other, live and when it is read again. Broken by letting the error out: it would break the stream
    of whoever comes later."""
    stream = await world.start()
    client = world.follow(stream.fence.key)
    await eventually(lambda: client.events)
    await world.redis.xadd(stream_key(stream.fence.key.run_id), {"x": "y"}, id="1-1")
    stream.reserve(1)
    await world.finish(stream)
    assert [e.event for e in await client.end()] == ["metadata", "resync", "end"]
    late = world.follow(stream.fence.key)
    assert [e.event for e in await late.end()] == ["metadata", "resync", "end"]


async def test_the_streams_of_two_hubs_do_not_disturb_each_other(
    world: World, database: str, redis_url: str
) -> None:
    """Two API processes, the same run."""
    async with open_world(database, redis_url) as other:
        stream = await world.start()
        clients = [world.follow(stream.fence.key), other.follow(stream.fence.key)]
        await world.finish(stream)
        for client in clients:
            assert [e.id for e in await client.end()] == ["1-0", "1-1"]


async def test_closing_a_hub_leaves_no_connection(database: str, redis_url: str) -> None:
    async with open_wire(redis_url) as (wire, url), Redis.from_url(redis_url):
        async with open_world(database, redis_url, hub_url=url) as world:
            client = world.follow((await world.start()).fence.key)
            await eventually(lambda: client.events)
            await client.cut()
        await eventually(lambda: wire.open_connections == 0)
