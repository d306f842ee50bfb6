"""Through the API: replay and live together are the run's log, wherever the connection is cut and whatever Redis loses.

Seen red: with events at or below the cursor given again, without the journal's events where ids jump, without `resync`,
with cursors that PostgreSQL cannot hold, and with a cursor beyond the end that waits for more.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.functions.api.app import create_app
from sandfleet.shared.ids import Owner, RunKey
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.streams.entry import parse_cursor
from sandfleet.shared.streams.follow import StreamEvent
from sandfleet.shared.streams.hub import Hub
from tests.api.conftest import make_settings, serve
from tests.streams.raw_client import RawClient, dispatched, get
from tests.streams.test_any_schedule import Play, faults
from tests.streams.wire import Wire, open_wire
from tests.streams.world import TENANT, USER, World, open_world, unhurried

# A thousand connections and eighty schedules are work for one core: on a loaded machine they take as long as it lets them.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = st.one_of(
    st.tuples(st.just("emit"), st.integers(0, 1), st.text("tm", min_size=1, max_size=5)),
    st.tuples(st.just("emit"), st.just(0), st.text("tm", min_size=1, max_size=5)),
    st.tuples(st.just("flush"), st.integers(0, 1)),
    st.tuples(st.sampled_from(("claim", "pause", "pause", "lose", "cut", "mend", "drop"))),
)


@dataclass
class Served:
    """The API in front of a world, its port and a key of the world's user."""

    world: World
    executor_wire: Wire
    api_wire: Wire
    port: int
    key: str

    def client(self, run: RunKey, limits: list[int], cursor: str | None = "0") -> RawClient:
        return RawClient(self.port, f"/runs/{run.run_id}/stream", self.key, limits, cursor)


@pytest.fixture(scope="module")
async def served(database: str, redis_url: str) -> AsyncIterator[Served]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        key = await create_key(connection, Owner(TENANT, USER), "test")
    with unhurried():
        async with (
            open_wire(redis_url) as (executor_wire, executor_url),
            open_wire(redis_url) as (api_wire, api_url),
            open_world(database, redis_url, publisher_url=executor_url) as world,
            serve(app := create_app(make_settings(database, api_url, sse_heartbeat_s=5.0))) as url,
        ):
            resources = app.state.resources
            await resources.hub.aclose()
            resources.hub = Hub(api_url, resources.pool, poll_every_s=0.05, grace_s=0.03)
            resources.hub.start()
            port = urlsplit(url).port
            assert port is not None
            yield Served(world, executor_wire, api_wire, port, key)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(STEPS, min_size=5, max_size=40),
    limits=st.lists(st.integers(0, 900), max_size=10),
    how=st.sampled_from(("published", "unpublished", "cancelled")),
)
async def test_any_cut_and_any_loss_give_a_right_view(
    served: Served, steps: list[tuple[object, ...]], limits: list[int], how: str
) -> None:
    """A live run with hand-overs, while its client is cut off after any number of bytes, again and again."""
    world = served.world
    await served.executor_wire.mend()
    play = Play(world, served.executor_wire, served.api_wire, await world.run())
    client = served.client(play.key, list(limits))
    following = asyncio.create_task(client.follow())
    try:
        await play.step("claim")
        for step in steps:
            await play.step(*step)  # type: ignore[arg-type]
        await play.finish(how)
        assert faults(await following, await world.journal(play.key)) == []
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await play.client.cut()


@pytest.mark.parametrize("lost", [False, True], ids=["all in Redis", "nothing in Redis"])
async def test_a_cut_at_every_byte_loses_and_repeats_nothing(served: Served, lost: bool) -> None:
    """Head, chunk sizes, ids, data, empty lines: the answer is cut at each byte of it once."""
    world = served.world
    await served.executor_wire.mend()
    stream = await world.start()
    for journalled in (True, False, False, True):
        stream.emit("updates" if journalled else "messages", b'{"n":1}', journalled=journalled)
    await world.finish(stream)
    if lost:
        await world.lose_stream(stream.fence.key)
    path, key = f"/runs/{stream.fence.key.run_id}/stream", served.key.encode()
    whole = await get(served.port, path, {"x-api-key": key, "last-event-id": b"0"})
    assert whole.whole
    expected, _ = dispatched(whole.body, None)
    assert faults(expected, await world.journal(stream.fence.key)) == []
    assert [each.event for each in expected].count("resync") == lost
    gate = asyncio.Semaphore(20)

    async def cut_at(limit: int) -> None:
        async with gate:
            assert await served.client(stream.fence.key, [limit]).follow() == expected, limit

    await asyncio.gather(*(cut_at(limit) for limit in range(len(whole.body) + 400)))


@pytest.mark.parametrize("end", ["published", "unpublished"])
@pytest.mark.parametrize(
    "cursor",
    [
        *(
            b"-1",
            b"0",
            b"",
            b"garbage",
            b"1-0",
            b"99-7",
            b"1-999999",
            b"0-0",
            b"0-99",
            b"1",
            b"1-",
            b"-",
            b"1-1-1",
        ),
        *(b"1.5-2", b"+1-2", b"1e3-0", b"0x1-0x2", b"1_0-2", b"-5--5", b"1 - 2", b"null", b"end", b"%31-%32"),
        *(b"9" * 40 + b"-1", b"1-" + b"9" * 4000, b"2147483647-2147483647", b"2147483648-0"),
        *("１-２".encode(), "٣-٤".encode(), b"\xff\xfe-\xfd", "🙂".encode()),
        b"of another run",
    ],
    ids=lambda cursor: repr(cursor)[:24],
)
async def test_a_finished_run_ends_the_stream_whatever_the_cursor(
    served: Served, cursor: bytes, end: str
) -> None:
    """The response ends as it should, with `end` last, and repeats nothing that the cursor covers. Red when a cursor that
    cannot be read is an error, when one beyond the end waits for more, or when one that is too large breaks a query."""
    world = served.world
    if cursor == b"of another run":
        other = await world.start()
        for _ in range(20):
            other.emit("updates", b"1", journalled=True)
        await world.finish(other)
        cursor = b"1-21"
    stream = await world.start()
    for kind in "mtm":
        stream.emit("updates" if kind == "m" else "messages", b"1", journalled=kind == "m")
    await world.finish(stream, publish=end == "published")
    headers = {"x-api-key": served.key.encode(), "last-event-id": cursor}
    part = await get(served.port, f"/runs/{stream.fence.key.run_id}/stream", headers)
    assert (part.status, part.whole) == (200, True)
    events, _ = dispatched(part.body, None)
    assert [each.event for each in events].count("end") == 1
    assert events[-1].event == "end"
    ids = [parse_cursor(each.id) for each in events if each.id and each.event != "end"]
    assert all(each > parse_cursor(cursor.decode("latin-1")) for each in ids)
    assert ids == sorted(set(ids))


async def test_a_cursor_from_the_future_still_gets_the_end_of_a_run_that_goes_on(served: Served) -> None:
    """Red when what is not above the cursor is waited for."""
    stream = await served.world.start()
    following = asyncio.create_task(served.client(stream.fence.key, [], "77-7").follow())
    stream.emit("updates", b"1", journalled=True)
    await served.world.finish(stream)
    assert [each.event for each in await following] == ["end"]


@pytest.mark.parametrize("over", [True, False], ids=["run is over", "run goes on"])
async def test_an_expired_cursor_gets_one_resync_with_the_current_state(served: Served, over: bool) -> None:
    """Redis has lost the stream, and token deltas with it, on both sides of journalled events. Red when nothing is said,
    when it is said for each hole, or when the state is an old one."""
    world = served.world
    await served.executor_wire.mend()
    stream = await world.start()
    for kind in "ttmttm":
        stream.emit("updates" if kind == "m" else "messages", b"1", journalled=kind == "m")
    await stream.drain()
    await world.lose_stream(stream.fence.key)
    await snapshot(world, stream.fence.key, {"n": 1})
    await snapshot(world, stream.fence.key, {"n": 2})
    if over:
        await world.finish(stream)
        await world.lose_stream(stream.fence.key)
    following = asyncio.create_task(served.client(stream.fence.key, [], "1-1").follow())
    if not over:
        stream.emit("updates", b"1", journalled=True)
        await world.finish(stream)
    events = await following
    had = [StreamEvent("1-0", "metadata", ""), StreamEvent("1-1", "messages", "")]
    assert faults([*had, *events], await world.journal(stream.fence.key)) == []
    (told,) = [json.loads(each.data) for each in events if each.event == "resync"]
    assert told["run_id"] == str(stream.fence.key.run_id)
    assert told["values"] == {"n": 2}
    assert told["status"] in (("success",) if over else ("running", "success"))


async def snapshot(world: World, run: RunKey, values: dict[str, int]) -> None:
    """The newest state of the run's thread."""
    async with world.pool.connection() as connection:
        await connection.execute(
            """insert into state_snapshots (tenant, user_id, thread_id, ns, checkpoint_id, run_id, "values", next, tasks,
                                            metadata, created_at)
               select tenant, user_id, thread_id::text, '', %s, run_id, %s, '[]', '[]', '{}', '2026-01-01T00:00:00+00:00'
               from runs where run_id = %s""",
            (f"c{values['n']}", json.dumps(values), run.run_id),
        )
