"""The client's view is right under any schedule of emits, flushes, hand-overs, zombies, losses and reconnects.

Each rule was switched off once to see a test fail:

- entries appended before their journalled events are committed → an event that is not in the journal was shown;
- no look into the journal when ids jump, or only within an attempt → journalled events are missing;
- no `resync` → a silent hole;
- events at or below the cursor not dropped → duplicates;
- no comparison with PostgreSQL → no `end`;
- an entry named by its first event instead of its last → token deltas are lost that Redis has (the second test).
"""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.fleet.executor.publisher import RunStream
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams.entry import EventId, parse_cursor, stream_key
from sandfleet.shared.streams.follow import StreamEvent
from tests.streams.wire import Wire, open_wire
from tests.streams.world import World, open_world, unhurried

# Two hundred schedules are work for one core: on a loaded machine they take as long as it lets them.
pytestmark = pytest.mark.timeout(1800)

QUIET_STEPS = st.one_of(
    st.tuples(st.just("emit"), st.integers(0, 2), st.text("tm", min_size=1, max_size=5)),
    st.tuples(st.just("emit"), st.just(0), st.text("tm", min_size=1, max_size=5)),
    st.tuples(st.just("flush"), st.integers(0, 2)),
    st.tuples(st.just("read"), st.integers(1, 6)),
    st.tuples(st.just("reconnect"), st.floats(0, 1)),
    st.tuples(st.sampled_from(("claim", "pause"))),
)
STEPS = QUIET_STEPS | st.tuples(st.sampled_from(("lose", "trim", "cut", "mend", "drop")))


class Play:
    """One run, all attempts on it, and one client that comes back by its cursor."""

    def __init__(self, world: World, executor_wire: Wire, api_wire: Wire, key: RunKey) -> None:
        self.world = world
        self.executor_wire = executor_wire
        self.api_wire = api_wire
        self.key = key
        self.attempts: list[RunStream] = []
        self.seen: list[StreamEvent] = []
        self.client = world.follow(key)

    async def step(self, name: str, *args: object) -> None:
        match name, args:
            case "claim", _:
                self.attempts.append(await self.world.claim(self.key))
            case "emit", (int(back), str(kinds)):
                for kind in kinds:
                    self._attempt(back).emit(
                        "messages" if kind == "t" else "updates", b"1", journalled=kind == "m"
                    )
            case "flush", (int(back),):
                await self._attempt(back).drain()
            case "lose", _:
                await self.world.lose_stream(self.key)
            case "trim", _:
                await self.world.redis.xtrim(stream_key(self.key.run_id), maxlen=1, approximate=False)
            case "cut", _:
                await self.executor_wire.cut()
            case "mend", _:
                await self.executor_wire.mend()
            case "drop", _:
                await self.api_wire.drop()
            case "pause", _:
                await asyncio.sleep(0.005)
            case "read", (int(count),):
                await self._read(len(self.client.events) + count)
            case "reconnect", (float(share),):
                await self.reconnect(share)

    def _attempt(self, back: int) -> RunStream:
        return self.attempts[max(len(self.attempts) - 1 - back, 0)]

    async def _read(self, count: int) -> None:
        for _ in range(30):
            if len(self.client.events) >= count or self.client.ended:
                return
            await asyncio.sleep(0.001)

    async def reconnect(self, share: float) -> None:
        """The client got only a part of what was sent, and comes back by the last id that it has."""
        await self.client.cut()
        got = self.client.events[: int(len(self.client.events) * share)]
        while got and got[-1].id is None:  # told again
            got.pop()
        self.seen += got
        last = next((event.id for event in reversed(self.seen)), None)
        self.client = self.world.follow(self.key, last)

    async def finish(self, how: str) -> None:
        """End the run."""
        owner = self.attempts[-1]
        by_others = how in ("cancelled", "announced", "announced error")
        if by_others or not await self.world.finish(owner, publish=how == "published"):
            error = "{}" if how == "announced error" else None
            await self.world.cancel(self.key, error=error, announce=how.startswith("announced"))

    async def end(self, how: str) -> None:
        await self.finish(how)
        self.seen += await self.client.end()


def faults(seen: list[StreamEvent], journal: list[tuple[EventId, str]]) -> list[str]:
    """What is wrong with a client's view."""
    ids = [parse_cursor(event.id) for event in seen if event.id]
    in_journal = dict(journal)
    found = []
    if ids != sorted(set(ids)):
        found.append("order or duplicates")
    if not seen or seen[-1].event != "end" or ids[-1] != journal[-1][0]:
        found.append("no end")
    if [event.event for event in seen].count("end") != 1:
        found.append("not exactly one end")
    if set(in_journal) - set(ids):
        found.append("journalled events missing")
    for event in seen:
        if event.id and event.event != "messages" and in_journal.get(parse_cursor(event.id)) != event.event:
            found.append("shown, but not in the journal")
    before = EventId(0, -1)
    announced = False  # up to the first token delta: what the journal has of a jump may have several holes
    fresh_resync = False
    for event in seen:
        if event.id is None:
            if fresh_resync:
                found.append("two resyncs for one hole")
            announced = fresh_resync = True
            continue
        event_id = parse_cursor(event.id)
        contiguous = event_id.seq == (before.seq + 1 if event_id.attempt == before.attempt else 0)
        if not contiguous and not announced:
            found.append("silent hole")
        if contiguous and fresh_resync:
            found.append("resync without a hole")
        fresh_resync = False
        announced = announced and event.event != "messages"
        before = event_id
    return found


@pytest.fixture(scope="module")
async def wired(database: str, redis_url: str):
    async with (
        open_wire(redis_url) as (executor_wire, executor_url),
        open_wire(redis_url) as (api_wire, api_url),
        open_world(
            database, redis_url, publisher_url=executor_url, hub_url=api_url, poll_every_s=0.05, grace_s=0.03
        ) as world,
    ):
        yield world, executor_wire, api_wire


@pytest.fixture(scope="module")
async def patient(database: str, redis_url: str):
    """A world whose clients wait for Redis and not for the journal."""
    with unhurried():
        async with open_world(database, redis_url, poll_every_s=0.5, grace_s=10) as world:
            yield world


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(STEPS, min_size=5, max_size=60),
    how=st.sampled_from(("published", "unpublished", "cancelled", "announced", "announced error")),
)
async def test_any_schedule_gives_the_client_a_right_view(
    wired: tuple[World, Wire, Wire], steps: list[tuple[object, ...]], how: str
) -> None:
    """In order, no duplicate, all of the journal, holes announced once, `end` last: see the module for what breaks it."""
    world, executor_wire, api_wire = wired
    await executor_wire.mend()
    play = Play(world, executor_wire, api_wire, await world.run())
    try:
        await play.step("claim")
        for step in steps:
            await play.step(*step)  # type: ignore[arg-type]
        await play.end(how)
        assert faults(play.seen, await world.journal(play.key)) == []
    finally:
        await play.client.cut()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(QUIET_STEPS, min_size=5, max_size=40))
async def test_while_redis_is_well_no_token_delta_is_missed(
    patient: World, wired: tuple[World, Wire, Wire], steps: list[tuple[object, ...]]
) -> None:
    """Across hand-overs and reconnects in the middle of an entry, no hole is ever announced.

    Broken by naming an entry by its first event: a client that comes back in its middle is not given the rest.
    """
    play = Play(patient, *wired[1:], await patient.run())
    try:
        await play.step("claim")
        for step in steps:
            await play.step(*step)  # type: ignore[arg-type]
        await play.end("published")
        assert faults(play.seen, await patient.journal(play.key)) == []
        assert "resync" not in [event.event for event in play.seen]
    finally:
        await play.client.cut()
