"""A client of a run's stream: what it sees from which cursor, and that its stream always ends."""

import json

import pytest

from sandfleet.fleet.executor.publisher import RunStream
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams.entry import stream_key
from sandfleet.shared.streams.follow import StreamEvent, filter_modes
from tests.streams.wire import open_wire
from tests.streams.world import World, open_world
from tests.waiting import eventually


async def play(world: World) -> tuple[RunKey, RunStream]:
    """A run that has shown `metadata`, three token deltas (1-1, 1-2, 1-4) and two updates (1-3, 1-5), all in Redis."""
    stream = await world.start()
    for n, kind in enumerate("ttmtm"):
        stream.emit("messages" if kind == "t" else "updates", b"%d" % n, journalled=kind == "m")
        await stream.drain()
    return stream.fence.key, stream


async def finished(world: World) -> RunKey:
    """The same run after its `end`, 1-6."""
    key, stream = await play(world)
    await world.finish(stream)
    return key


async def test_events_arrive_in_order_with_contiguous_ids_up_to_end(world: World) -> None:
    """A run's whole stream, watched live: `metadata` first, `end` last, one id per event."""
    key = await world.run()
    client = world.follow(key, fresh=True)
    stream = await world.claim(key)
    for n in range(5):
        stream.emit("messages", b"%d" % n, journalled=False)
        stream.emit("updates", b"%d" % n, journalled=True)
    await world.finish(stream)
    events = await client.end()
    assert [e.id for e in events] == [f"1-{n}" for n in range(12)]
    assert [e.event for e in events] == ["metadata", *["messages", "updates"] * 5, "end"]
    assert json.loads(events[0].data) == {"run_id": str(key.run_id), "attempt": 1, "checkpoint_id": None}
    assert events[-1].data == "null"


@pytest.mark.parametrize("cursor", [None, "", "0", "-1", "0-0", "garbage", "99999999999999999999"])
async def test_no_usable_cursor_gives_everything_also_after_the_end(world: World, cursor: str | None) -> None:
    client = world.follow(await finished(world), cursor)
    assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(7)]


@pytest.mark.parametrize("last", range(7))
async def test_a_cursor_gives_what_comes_after_it(world: World, last: int) -> None:
    """At every event, the `end` included: who has that has everything, and the stream just closes."""
    client = world.follow(await finished(world), f"1-{last}")
    assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(last + 1, 7)]


async def test_a_cursor_within_a_flush_gives_no_event_again(world: World) -> None:
    """Redis has the events of a flush as one entry. Broken by giving all of it."""
    stream = await world.start()
    for n in range(3):
        stream.emit("messages", b"%d" % n, journalled=False)
    await world.finish(stream)
    assert await world.redis.xlen(stream_key(stream.fence.key.run_id)) == 2
    client = world.follow(stream.fence.key, "1-1")
    assert [e.id for e in await client.end()] == ["1-2", "1-3", "1-4"]


@pytest.mark.parametrize("cursor", ["1-7", "1-4000000000", "7-0", "1-999"])
async def test_a_cursor_from_the_future_or_another_run_still_gets_the_end(world: World, cursor: str) -> None:
    """Broken by dropping all at or below the cursor, the end included: heartbeats for ever."""
    client = world.follow(await finished(world), cursor)
    assert await client.end() == [StreamEvent("1-6", "end", "null")]


async def test_a_cursor_from_the_future_gets_the_end_of_a_run_that_still_runs(world: World) -> None:
    key, stream = await play(world)
    client = world.follow(key, "9-9")
    await eventually(lambda: world.hub._watched)
    await world.finish(stream)
    assert await client.end() == [StreamEvent("1-6", "end", "null")]


async def test_joining_live_shows_only_what_comes_from_now_on(world: World) -> None:
    """Broken by telling of a hole: what came before the join is not missing."""
    key, stream = await play(world)
    client = world.follow(key, live_only=True)
    await eventually(lambda: world.hub._watched)
    stream.emit("messages", b"9", journalled=False)
    await world.finish(stream)
    assert [e.id for e in await client.end()] == ["1-6", "1-7"]


async def test_joining_live_after_redis_lost_everything(world: World) -> None:
    key, stream = await play(world)
    await world.lose_redis()
    client = world.follow(key, live_only=True)
    await eventually(lambda: world.hub._watched)
    stream.emit("messages", b"9", journalled=False)
    await world.finish(stream)
    assert [e.event for e in await client.end()] == ["messages", "end"]


async def test_joining_a_finished_run_live_gives_its_end(world: World) -> None:
    client = world.follow(await finished(world), live_only=True)
    assert await client.end() == [StreamEvent("1-6", "end", "null")]


async def test_a_finished_run_ends_its_streams_after_redis_lost_everything(world: World) -> None:
    """From the start, without the buffer: the journal, one `resync` for the token deltas, and `end`. Broken by waiting
    for Redis: heartbeats for ever."""
    key = await finished(world)
    await world.lose_redis()
    events = await world.follow(key, "-1").end()
    assert [e.id for e in events] == ["1-0", None, "1-3", "1-5", "1-6"]
    assert events[1].event == "resync"
    assert json.loads(events[1].data) == {"run_id": str(key.run_id), "status": "success", "values": {}}


@pytest.mark.parametrize("cursor", ["0", "1-3", "1-6", "1-7", "9-0"])
@pytest.mark.parametrize("lost", [False, True], ids=["", "redis lost everything"])
async def test_a_finished_run_ends_its_streams_at_once(
    database: str, redis_url: str, cursor: str, lost: bool
) -> None:
    """No comparison with PostgreSQL comes to help within the test's time. Broken by leaving it to that."""
    async with open_world(database, redis_url, poll_every_s=60) as world:
        key = await finished(world)
        if lost:
            await world.lose_redis()
        events = await world.follow(key, cursor).end()
        assert [e.event for e in events][-1:] == ([] if cursor == "1-6" else ["end"])


async def test_token_deltas_that_redis_trimmed_are_announced_as_one_hole(world: World) -> None:
    """Broken by going on where the stream goes on: the client would take its text for complete."""
    key, stream = await play(world)
    await world.redis.xtrim(stream_key(key.run_id), maxlen=1, approximate=False)
    await world.finish(stream)
    assert [e.id for e in await world.follow(key, "1-0").end()] == [None, "1-3", "1-5", "1-6"]


@pytest.mark.parametrize(
    "lost", [("1-1", "1-2", "1-4"), ("1-1", "1-2", "1-4", "1-5", "1-6")], ids=["within", "at the end"]
)
async def test_each_of_two_holes_is_announced(world: World, lost: tuple[str, ...]) -> None:
    """What lies between them was whole. Red when only the first one is, whether the second shows in Redis or when the
    journal tells what Redis has not."""
    key = await finished(world)
    assert await world.redis.xdel(stream_key(key.run_id), *lost) == len(lost)
    events = await world.follow(key).end()
    assert [e.id for e in events] == ["1-0", None, "1-3", None, "1-5", "1-6"]


async def test_no_hole_is_announced_where_only_journalled_events_were_lost(world: World) -> None:
    """What Redis lost is in the journal, so nothing is missing."""
    stream = await world.start()
    for n in range(4):
        stream.emit("updates", b"%d" % n, journalled=True)
        await stream.drain()
    await world.lose_redis()
    await world.finish(stream)
    client = world.follow(stream.fence.key)
    assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(6)]


async def test_more_journalled_events_than_one_query_gives(world: World) -> None:
    """Red when what comes behind the first page is taken for nothing: the stream would end without it, in silence."""
    stream = await world.start()
    await stream.drain()
    stream.reserve(1100)
    async with world.pool.connection() as connection:
        await connection.execute(
            "insert into journal (tenant, user_id, run_id, attempt, seq, event, data)"
            " select %s, %s, %s, 1, n, 'updates', '1' from generate_series(1, 1100) n",
            tuple(stream.fence.key),
        )
    await world.finish(stream)
    await world.lose_redis()
    client = world.follow(stream.fence.key)
    assert [e.id for e in await client.end()] == [f"1-{n}" for n in range(1102)]


async def test_an_executor_that_dies_between_commit_and_append_loses_nothing_journalled(world: World) -> None:
    """Its successor's first event comes with the missing ones before it, though Redis never had them."""
    key, stream = await play(world)
    client = world.follow(key)
    async with world.pool.connection() as connection:
        await connection.execute(
            "insert into journal (tenant, user_id, run_id, attempt, seq, event, data) values (%s, %s, %s, 1, 6, 'updates', '1')",
            tuple(key),
        )
    await world.finish(await world.claim(key))
    assert [e.id for e in await client.end()] == [*(f"1-{n}" for n in range(7)), "2-0", "2-1"]
    assert stream.fence.attempt == 1


async def test_a_run_that_was_cancelled_before_it_began_ends(world: World) -> None:
    key = await world.run()
    client = world.follow(key, fresh=True)
    await world.cancel(key)
    assert await client.end() == [StreamEvent("1-0", "end", "null")]


async def test_a_run_that_vanishes_ends_its_streams(world: World) -> None:
    """Deleted, or rolled back. Broken by a comparison that skips runs without a row."""
    key, _ = await play(world)
    client = world.follow(key)
    await eventually(lambda: len(client.events) == 6)
    await world.erase(key)
    assert (await client.end())[-1] == StreamEvent(None, "end", "null")


async def test_a_foreign_key_shows_nothing(world: World) -> None:
    """The run id alone is not enough, although it names the stream in Redis. Broken by reading Redis first."""
    key = await finished(world)
    assert await world.follow(key._replace(user_id="eve"), "-1").end() == [StreamEvent(None, "end", "null")]
    assert await world.follow(key._replace(tenant="evil"), "-1").end() == [StreamEvent(None, "end", "null")]


async def test_a_window_closes_without_end_and_the_next_one_goes_on(world: World) -> None:
    key, stream = await play(world)
    first = await world.follow(key, None, window_s=0.3).end()
    await world.finish(stream)
    second = await world.follow(key, first[-1].id, window_s=30).end()
    assert "end" not in [e.event for e in first]
    assert [e.id for e in first + second] == [f"1-{n}" for n in range(7)]


async def test_an_outage_of_postgresql_pauses_a_stream_and_does_not_break_it(
    database: str, redis_url: str
) -> None:
    """The reader's own way to PostgreSQL is cut while it has a hole to fill. Broken by letting the error out."""
    async with (
        open_world(database, redis_url) as world,
        open_wire(database) as (wire, wired_url),
        open_world(wired_url, redis_url, poll_every_s=3600) as cut_off,
    ):
        cut_off.pool.timeout = 0.1
        key, stream = await play(world)
        client = cut_off.follow(key)
        await eventually(lambda: len(client.events) == 6)
        await wire.cut()
        stream.reserve(1)  # as if a token delta had been dropped
        await world.finish(stream)
        await eventually(lambda: cut_off.pool.get_stats().get("requests_errors", 0) > 1, what="two failures")
        assert not client.ended
        await wire.mend()
        assert [e.id for e in await client.end()] == [*(f"1-{n}" for n in range(6)), None, "1-7"]


async def test_stream_modes_filter_by_the_sdks_names() -> None:
    """`messages` is the mode `messages-tuple`, `messages/…` the mode `messages`; what frames a run always passes."""
    names = [
        "metadata",
        "values",
        "updates",
        "updates|child:1|deep:2",
        "messages",
        "messages|child:1",
        "messages/partial",
        "messages/metadata",
        "custom",
        "error",
        "resync",
        "end",
    ]

    async def events():
        for name in names:
            yield StreamEvent(None, name, "1")

    async def passing(*modes: str) -> list[str]:
        frame = {"metadata", "error", "resync", "end"}
        return [e.event async for e in filter_modes(events(), modes) if e.event not in frame]

    assert await passing("updates") == ["updates", "updates|child:1|deep:2"]
    assert await passing("messages-tuple") == ["messages", "messages|child:1"]
    assert await passing("messages", "custom") == ["messages/partial", "messages/metadata", "custom"]
    assert len(await passing()) == 8
    assert [e.event async for e in filter_modes(events(), ["tasks"])] == [
        "metadata",
        "error",
        "resync",
        "end",
    ]
