"""The reader of all streams that the clients of one process watch.

One blocking Redis connection serves them all, so a client costs no connection; a second one, shared too, carries the
short commands. Once a second one PostgreSQL query asks for all watched runs whether there is more than Redis has shown.
"""

import asyncio
import logging
import uuid
from typing import Any

import psycopg
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams import journal
from sandfleet.shared.streams.entry import FIELD, START, Event, EventId, decode, parse_entry_id, stream_key
from sandfleet.shared.streams.journal import Head

_log = logging.getLogger(__name__)
_FIELD = FIELD.encode()
_AWAY = (RedisError, OSError, TimeoutError)
_WAKE_TTL_S = 60
_COMMAND_TIMEOUT_S = 2.0
_COUNT = 64  # entries of one stream per read


class Subscription:
    """One client's view of one run: a bounded buffer of live events, and what PostgreSQL last said."""

    def __init__(self, hub: "Hub", key: RunKey, cursor: EventId, behind: bool) -> None:
        self.key = key
        self.cursor = cursor
        """Id of the last event that the client was given; kept up to date by the client."""
        self.lost = behind
        """Events after ``cursor`` may be in Redis that will not come through the buffer: re-read, after ``resume``."""
        self.head: Head | None = None
        """The newest head that PostgreSQL reported."""
        self.vanished = False
        """The run does not exist any more."""
        self._hub = hub
        self._events: list[Event] = []
        self._size = 0
        self._changed = asyncio.Event()

    def push(self, events: list[Event]) -> None:
        """Called by the hub with live events. A client that is too slow loses its buffer and re-reads."""
        if self.lost:
            return
        self._events += events
        self._size += sum(len(event.data) for event in events)
        if len(self._events) > self._hub.buffer_events or self._size > self._hub.buffer_bytes:
            self.lost = True
            self._clear()
        self._changed.set()

    def take(self) -> list[Event]:
        """The buffered events, in the order of the stream; ids may repeat what a re-read has given."""
        self._changed.clear()
        events = self._events
        self._clear()
        return events

    def resume(self) -> None:
        """Buffer again from now on."""
        self.lost = False

    def notify(self) -> None:
        """End ``wait``."""
        self._changed.set()

    async def wait(self) -> None:
        """Until something changed since the last ``take``."""
        await self._changed.wait()

    def close(self) -> None:
        """Stop watching."""
        self._hub._unsubscribe(self)

    def _clear(self) -> None:
        self._events = []
        self._size = 0


class _Watched:
    """A run that at least one client watches. ``position`` is the id of the last entry that was read; until ``read`` it is
    only what clients say that they have, which may be an id that is yet to come."""

    __slots__ = ("key", "position", "read", "stream", "subscriptions")

    def __init__(self, key: RunKey, position: EventId) -> None:
        self.key = key
        self.stream = stream_key(key.run_id)
        self.position = position
        self.read = False
        self.subscriptions: set[Subscription] = set()


class Hub:
    """Reads on behalf of all clients of a process. ``start`` it inside the event loop, ``aclose`` it at the end.

    ``poll_every_s`` is the pause between looks at PostgreSQL. ``grace_s`` is how long Redis may lag behind PostgreSQL
    before a client is served from the journal. A pause of 0.2 ms per watched run, up to 20 ms, between two reads gathers
    events under load: one client waits for nothing, a hundred cost 50 reads a second. ``buffer_events`` and
    ``buffer_bytes`` (characters of data) bound what waits for one slow client.
    """

    def __init__(
        self,
        redis_url: str,
        pool: Pool,
        *,
        poll_every_s: float = 1.0,
        grace_s: float = 0.2,
        block_s: float = 5.0,
        pause_per_run_s: float = 0.0002,
        max_pause_s: float = 0.02,
        buffer_events: int = 2_000,
        buffer_bytes: int = 1024 * 1024,
    ) -> None:
        self.pool = pool
        self.grace_s = grace_s
        self.buffer_events = buffer_events
        self.buffer_bytes = buffer_bytes
        self.redis_up = True
        """False from a failed read until the next good one."""
        self._poll_every_s = poll_every_s
        self._block_ms = int(block_s * 1000)
        self._pause_per_run_s = pause_per_run_s
        self._max_pause_s = max_pause_s
        self._reader = _connect(redis_url)
        self._redis = _connect(redis_url)
        self._watched: dict[RunKey, _Watched] = {}
        self._by_stream: dict[bytes, _Watched] = {}
        self._anything = asyncio.Event()
        self._blocked = False
        self._wake_key = f"sf:hub:{uuid.uuid4()}"
        self._wakes_sent = 0
        self._wakes_read = 0
        self._waking: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to read; a second call changes nothing."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._poll())]

    async def aclose(self) -> None:
        """Stop reading and close both connections; subscriptions get nothing more."""
        tasks = [*self._tasks, *([self._waking] if self._waking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._reader.aclose()
        await self._redis.aclose()

    def subscribe(self, key: RunKey, cursor: EventId) -> Subscription:
        """Watch a run from ``cursor`` on. The caller has checked that the run is its client's: Redis does not."""
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(key, cursor)
            self._by_stream[watched.stream.encode()] = watched
            self._anything.set()
            self._wake()
        elif not watched.read and cursor < watched.position:
            watched.position = cursor  # the others drop what they have
            self._wake()
        subscription = Subscription(self, key, cursor, behind=watched.position > cursor)
        watched.subscriptions.add(subscription)
        return subscription

    async def reread(self, key: RunKey, after: EventId) -> tuple[list[Event], EventId | None]:
        """Up to 64 entries after an id, and the id to go on from, None at the end. Nothing while Redis is away."""
        begin = "-" if after == START else f"({after}"
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                entries = await self._redis.xrange(stream_key(key.run_id), min=begin, count=_COUNT)
        except _AWAY:
            return [], None
        events = [event for entry_id, fields in entries for event in _events(key, entry_id, fields)]
        return events, parse_entry_id(entries[-1][0]) if len(entries) == _COUNT else None

    async def top(self, key: RunKey) -> EventId:
        """Id of the last entry of a run's stream; START when there is none or Redis is away."""
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                entries = await self._redis.xrevrange(stream_key(key.run_id), count=1)
        except _AWAY:
            return START
        return parse_entry_id(entries[0][0]) if entries else START

    def _unsubscribe(self, subscription: Subscription) -> None:
        watched = self._watched.get(subscription.key)
        if watched is not None:
            watched.subscriptions.discard(subscription)
            if not watched.subscriptions:
                del self._watched[watched.key]
                del self._by_stream[watched.stream.encode()]
                if not self._watched:
                    self._anything.clear()

    async def _read(self) -> None:
        backoff_s = 0.05
        while True:
            await self._anything.wait()
            try:
                await self._read_once()
            except Exception as error:  # one reader serves all clients: it never ends
                if not isinstance(error, _AWAY):
                    _log.exception("reading streams")
                elif self.redis_up:
                    _log.warning("reading streams: Redis is away (%s)", type(error).__name__)
                self.redis_up = False
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, 1.0)
                continue
            if not self.redis_up:
                self.redis_up = True
                _log.info("reading streams: Redis is back")
            backoff_s = 0.05
            await asyncio.sleep(min(len(self._watched) * self._pause_per_run_s, self._max_pause_s))

    async def _read_once(self) -> None:
        wake_key = self._wake_key.encode()
        asked = {stream: (watched, watched.position) for stream, watched in self._by_stream.items()}
        positions: dict[Any, Any] = {wake_key: f"{self._wakes_read}-0"}
        for stream, (_, position) in asked.items():
            positions[stream] = "0" if position == START else str(position)
        # After a failure a short block shows soon whether Redis is back.
        block_ms = self._block_ms if self.redis_up else 1
        self._blocked = True
        try:
            # Above the block time, or it would end a quiet, healthy read.
            async with asyncio.timeout(block_ms / 1000 + _COMMAND_TIMEOUT_S):
                reply = await self._reader.xread(positions, count=_COUNT, block=block_ms)
        finally:
            self._blocked = False
        for stream, entries in reply:
            if stream == wake_key:
                self._wakes_read = parse_entry_id(entries[-1][0]).attempt
                continue
            watched, position = asked[stream]
            # Else it is watched anew meanwhile, or from an earlier position.
            if self._by_stream.get(stream) is watched and watched.position == position:
                self._deliver(watched, entries)

    @staticmethod
    def _deliver(watched: _Watched, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        watched.position = parse_entry_id(entries[-1][0])
        watched.read = True
        events = [event for entry_id, fields in entries for event in _events(watched.key, entry_id, fields)]
        for subscription in watched.subscriptions:
            subscription.push(events)

    def _wake(self) -> None:
        """Make a blocked read return, so that the next one includes what is watched since."""
        if self._blocked and (self._waking is None or self._waking.done()):
            self._waking = asyncio.create_task(self._send_wake())

    async def _send_wake(self) -> None:
        while self._blocked and self.redis_up:
            self._wakes_sent += 1
            try:
                async with (
                    asyncio.timeout(_COMMAND_TIMEOUT_S),
                    self._redis.pipeline(transaction=True) as pipeline,
                ):
                    pipeline.xadd(self._wake_key, {"w": 1}, id=f"{self._wakes_sent}-0", maxlen=1)
                    pipeline.expire(self._wake_key, _WAKE_TTL_S)
                    await pipeline.execute()
                return
            except _AWAY:
                await asyncio.sleep(0.1)

    async def _poll(self) -> None:
        reachable = True
        while True:
            await asyncio.sleep(self._poll_every_s)
            seen = [
                (watched.key, min(subscription.cursor for subscription in watched.subscriptions))
                for watched in self._watched.values()
            ]
            if not seen:
                continue
            try:
                found = await journal.news(self.pool, seen)
            except Exception as error:  # one loop serves all clients: it never ends
                if not isinstance(error, psycopg.OperationalError):
                    _log.exception("comparing streams with the journal")
                elif reachable:
                    _log.warning("comparing streams with the journal: %s", type(error).__name__)
                reachable = False
                continue
            reachable = True
            for key, head in found:
                watched = self._watched.get(key)
                for subscription in watched.subscriptions if watched else ():
                    subscription.head = head
                    subscription.vanished = head is None
                    subscription.notify()


def _connect(url: str) -> Redis:
    # One connection, which callers wait for; no retries, because every caller has its own way to go on. No socket_timeout
    # either: redis-py puts writes into asyncio.wait_for then, which swallows cancellation on Python 3.11.
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=1,
        timeout=None,
        socket_connect_timeout=_COMMAND_TIMEOUT_S,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def _events(key: RunKey, entry_id: bytes, fields: dict[bytes, bytes]) -> list[Event]:
    try:
        return decode(entry_id, fields[_FIELD])
    except (ValueError, KeyError, TypeError):
        # A hole as any other: the reader fills it from the journal.
        _log.error("an entry of a stream cannot be decoded", extra={"run_id": str(key.run_id)})
        return []
