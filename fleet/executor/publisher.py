"""Publishes the events of all runs of an executor: journalled ones are committed first, then everything goes to Redis.

All runs share one flush: it takes what they have buffered, submits the journalled rows to the fenced writer, and appends
to Redis, in one call, whatever is committed or needs no commit. The order of one attempt's events is kept throughout,
because a run has at most one flush under way.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import orjson
import psycopg
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sandfleet.fleet.executor.fenced_rows import JournalRow
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import Superseded
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.streams.append import Appender, Entry, Outcome
from sandfleet.shared.streams.entry import EventId, encode

_log = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 1.0
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_VERIFY_TIMEOUT_S = 2.0
_AWAY = (RedisError, OSError, TimeoutError)


class _Kind(Enum):
    TOKEN = "token"  # noqa: S105  # may be dropped
    JOURNALLED = "journalled"  # committed before it is appended
    COMMITTED = "committed"  # by a transaction of its own


class _Buffered(NamedTuple):
    seq: int
    event: str
    data: bytes
    kind: _Kind


class RunStream:
    """The events of one attempt of a run. For use on the publisher's event loop only."""

    __slots__ = (
        "_appended",
        "_buffer",
        "_create",
        "_first_token",
        "_flight",
        "_kept_bytes",
        "_kept_events",
        "_next",
        "_publisher",
        "_token_bytes",
        "_waiters",
        "dropped",
        "fence",
        "superseded",
    )

    def __init__(self, publisher: "Publisher", fence: Fence) -> None:
        self.fence = fence
        self.superseded = asyncio.Event()
        """Set when another attempt, or the run's end, came first: nothing is published any more."""
        self.dropped = 0
        """Events that clients see as a hole: dropped by overflow, or refused by PostgreSQL."""
        self._publisher = publisher
        self._next = 0
        self._buffer: list[_Buffered] = []
        self._token_bytes = 0
        self._kept_events = 0  # journalled ones in buffer and flight, which nothing drops
        self._kept_bytes = 0
        self._first_token = True
        self._flight: list[_Buffered] = []  # submitted or being appended
        self._create = False  # the flight may make the stream
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def emit(self, event: str, data: bytes, journalled: bool) -> None:
        """Take an event; ``data`` is JSON in UTF-8. Never blocks. Once superseded, events are ignored.

        Journalled events are never dropped; the memory they take is bounded by a caller that awaits ``drain`` when the
        stream is ``crowded``. Of the others, the buffered ones are dropped together when they exceed the publisher's bound.
        """
        if self.superseded.is_set():
            return
        kind = _Kind.JOURNALLED if journalled else _Kind.TOKEN
        seq = self._next
        self._next += 1
        if not event.isascii() or "\0" in event:  # a node's name may hold what PostgreSQL cannot
            event = event.replace("\0", "\ufffd").encode(errors="replace").decode()
        self._buffer.append(_Buffered(seq, event, data, kind))
        at_once = seq == 0
        if kind is _Kind.TOKEN:
            at_once = at_once or self._first_token
            self._first_token = False
            self._token_bytes += len(data)
            if (
                self._token_bytes > self._publisher.buffer_bytes
                or len(self._buffer) > self._publisher.buffer_events
            ):
                self._drop_tokens()
        else:
            self._kept_events += 1
            self._kept_bytes += len(data)
        self._publisher._schedule(self, at_once)

    @property
    def crowded(self) -> bool:
        """Whether more journalled events wait, to be committed and appended, than the publisher's bound."""
        publisher = self._publisher
        return self._kept_events > publisher.kept_events or self._kept_bytes > publisher.kept_bytes

    def reserve(self, count: int) -> int:
        """Take ``count`` numbers for events that another transaction journals; returns the first."""
        first = self._next
        self._next += count
        return first

    def append_committed(self, events: Iterable[tuple[int, str, bytes]]) -> None:
        """Publish (seq, event, data) with reserved numbers, after the transaction that journalled them."""
        if not self.superseded.is_set():
            self._buffer += (_Buffered(seq, event, data, _Kind.COMMITTED) for seq, event, data in events)
            self._publisher._schedule(self, at_once=True)

    async def drain(self) -> None:
        """Until all that was emitted is journalled where it must be, and appended to Redis or given up.

        Never raises; ``superseded`` says whether it was in vain.
        """
        if self.superseded.is_set() or not (self._buffer or self._flight):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._next, done))
        self._publisher._schedule(self, at_once=True)
        await done

    def _take(self) -> list[JournalRow]:
        """Move the buffer into flight; returns what must be journalled first."""
        self._flight, self._buffer = self._buffer, []
        self._token_bytes = 0
        # The fence of the commit that precedes the append has verified the attempt.
        self._create = self._flight[0].seq == 0 or any(b.kind is not _Kind.TOKEN for b in self._flight)
        return [JournalRow(b.seq, b.event, b.data) for b in self._flight if b.kind is _Kind.JOURNALLED]

    def _land(self) -> None:
        """The flight is over."""
        landed = [len(buffered.data) for buffered in self._flight if buffered.kind is _Kind.JOURNALLED]
        self._kept_events -= len(landed)
        self._kept_bytes -= sum(landed)
        self._flight = []
        if self._buffer:
            self._publisher._schedule(self, at_once=bool(self._waiters))
        self._settle()

    def _die(self) -> None:
        self.superseded.set()
        self._buffer = []
        self._flight = []
        self._kept_events = self._kept_bytes = 0
        self._settle()

    def _settle(self) -> None:
        pending = self._flight or self._buffer
        first = pending[0].seq if pending else self._next
        for target, done in self._waiters:
            if target <= first and not done.done():
                done.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]

    def _drop_tokens(self) -> None:
        """All at once: readers see one hole instead of many. The numbers stay used, so the hole announces itself."""
        kept = [buffered for buffered in self._buffer if buffered.kind is not _Kind.TOKEN]
        self.dropped += len(self._buffer) - len(kept)
        self._buffer = kept
        self._token_bytes = 0


class Publisher:
    """Publishes for all runs of a process. ``buffer_events`` and ``buffer_bytes`` bound the token deltas that wait for
    one run's flush; beyond ``kept_events`` or ``kept_bytes`` of journalled events its stream is crowded.

    While Redis is away journalled events are journalled all the same, token deltas are given up, and nothing waits.
    """

    def __init__(
        self,
        writer: FencedWriter,
        redis: Redis,
        pool: Pool,
        settings: Settings,
        *,
        buffer_events: int = 5_000,
        buffer_bytes: int = 1024 * 1024,
        kept_events: int = 1_000,
        kept_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        self.buffer_events = buffer_events
        self.buffer_bytes = buffer_bytes
        self.kept_events = kept_events
        self.kept_bytes = kept_bytes
        self._writer = writer
        self._redis = redis
        self._pool = pool
        self._appender = Appender(redis, ttl_s=settings.stream_ttl_s, max_entries=settings.stream_max_entries)
        self._pause_s = settings.flush_pause_ms / 1000
        self._dirty: dict[RunStream, None] = {}  # runs with a buffer, in order of arrival
        self._timer: asyncio.Handle | None = None
        self._timer_at_once = False
        self._flushed_at = 0.0
        self._ready: list[RunStream] = []  # runs whose flight may be appended
        self._append_wake = asyncio.Event()
        self._flying: set[RunStream] = set()
        self._landed = asyncio.Event()
        self._away_until = 0.0
        self._failures = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Begin to append. Does not wait for Redis."""
        self._tasks.add(asyncio.create_task(self._append(), name="publisher"))

    async def aclose(self, deadline_s: float = 5.0) -> None:
        """Flush what is buffered, for at most ``deadline_s``, and stop. The writer must still be running."""
        try:
            async with asyncio.timeout(deadline_s):
                self._flush()
                while self._flying:
                    self._landed.clear()
                    await self._landed.wait()
                    self._flush()
        except TimeoutError:
            _log.warning("%d runs were not flushed in time", len(self._dirty.keys() | self._flying))
        if self._timer is not None:
            self._timer.cancel()
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self, fence: Fence, checkpoint_id: str | None) -> RunStream:
        """The stream of an attempt. Its first event, ``metadata``, is emitted here: it names the checkpoint that the
        attempt goes on from."""
        stream = RunStream(self, fence)
        metadata = {
            "run_id": str(fence.key.run_id),
            "attempt": fence.attempt,
            "checkpoint_id": checkpoint_id,
        }
        stream.emit("metadata", orjson.dumps(metadata), journalled=True)
        return stream

    def close(self, stream: RunStream) -> None:
        """The caller emits nothing more. What is buffered is still flushed."""
        if stream._buffer:
            self._schedule(stream, at_once=True)

    def _schedule(self, stream: RunStream, at_once: bool) -> None:
        self._dirty[stream] = None
        if stream._flight:
            return  # goes on when it has landed
        if self._timer is not None:
            if not at_once or self._timer_at_once:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        due = self._flushed_at + self._pause_s
        self._timer_at_once = at_once or due <= loop.time()
        self._timer = loop.call_soon(self._flush) if self._timer_at_once else loop.call_at(due, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flushed_at = asyncio.get_running_loop().time()
        for stream in [stream for stream in self._dirty if not stream._flight]:
            del self._dirty[stream]
            if not stream._buffer:
                stream._settle()
                continue
            rows = stream._take()
            self._flying.add(stream)
            if rows:
                committed = self._writer.submit(stream.fence, rows)
                committed.add_done_callback(partial(self._committed, stream))
            else:
                self._ready.append(stream)
                self._append_wake.set()

    def _committed(self, stream: RunStream, done: "asyncio.Future[None]") -> None:
        error = None if done.cancelled() else done.exception()
        if isinstance(error, Superseded):
            self._bury(stream)
        elif error is not None or done.cancelled():
            # Readers must not see what is not journalled; the used numbers announce the hole.
            _log.error(
                "events could not be journalled (%s)",
                type(error).__name__,
                extra={"run_id": str(stream.fence.key.run_id), "tenant": stream.fence.key.tenant},
            )
            stream.dropped += len(stream._flight)
            self._landed_one(stream)
        else:
            reach("event.journalled")
            self._ready.append(stream)
            self._append_wake.set()

    def _landed_one(self, stream: RunStream) -> None:
        self._flying.discard(stream)
        stream._land()
        self._landed.set()

    def _bury(self, stream: RunStream) -> None:
        self._flying.discard(stream)
        self._dirty.pop(stream, None)
        stream._die()
        self._landed.set()

    async def _append(self) -> None:
        while not self._closing:  # a client with a socket_timeout swallows cancellation on Python 3.11
            await self._append_wake.wait()
            self._append_wake.clear()
            streams, self._ready = self._ready, []
            try:
                await self._append_once(streams)
            except Exception:  # one task serves all runs: it never ends
                _log.exception("appending to streams")
                for stream in streams:
                    self._landed_one(stream)

    async def _append_once(self, streams: Sequence[RunStream]) -> None:
        outcomes = await self._try_to_append(streams)
        missing: list[RunStream] = []
        for stream, outcome in zip(streams, outcomes, strict=True):
            if outcome is Outcome.MISSING:
                missing.append(stream)
            elif outcome is Outcome.SUPERSEDED:
                self._bury(stream)
            else:
                self._landed_one(stream)
        if missing:
            # Apart, so that PostgreSQL being away holds up nobody else.
            task = asyncio.create_task(self._verify(missing))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _try_to_append(self, streams: Sequence[RunStream]) -> Sequence[Outcome | None]:
        """An outcome per stream, None when Redis is away and the flight is given up."""
        away: list[Outcome | None] = [None] * len(streams)
        if time.monotonic() < self._away_until:
            return away
        entries = [
            Entry(
                stream.fence.key.run_id,
                EventId(stream.fence.attempt, stream._flight[-1].seq),
                encode([(b.seq, b.event, b.data) for b in stream._flight]),
                stream._create,
            )
            for stream in streams
        ]
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                try:
                    outcomes = await self._appender.append(entries)
                except (RedisError, OSError):
                    # A pooled connection that a restart has closed: the second try opens another.
                    outcomes = await self._appender.append(entries)
        except _AWAY as error:
            if self._failures == 0:
                _log.warning("publishing: Redis is away (%s)", type(error).__name__)
            self._away_until = time.monotonic() + _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
            self._failures += 1
            return away
        if self._failures:
            _log.info("publishing: Redis is back")
        self._failures = 0
        return outcomes

    async def _verify(self, streams: Sequence[RunStream]) -> None:
        """Streams that are gone: append anew, and make them, where the attempt is still the current one."""
        try:
            async with asyncio.timeout(_VERIFY_TIMEOUT_S):
                current = await _current(self._pool, [stream.fence for stream in streams])
        except Exception as error:
            if not isinstance(error, (psycopg.OperationalError, TimeoutError)):
                _log.exception("verifying attempts")
            for stream in streams:
                self._landed_one(stream)
            return
        for n, stream in enumerate(streams):
            if n in current:
                stream._create = True
                self._ready.append(stream)
                self._append_wake.set()
            else:
                self._bury(stream)


async def _current(pool: Pool, fences: Sequence[Fence]) -> set[int]:
    """Positions of the fences whose attempt owns its run now."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """
            select f.n - 1 from unnest(%s::text[], %s::text[], %s::uuid[], %s::int[])
              with ordinality f (tenant, user_id, run_id, attempt, n)
            join runs r using (tenant, user_id, run_id, attempt) where r.status = 'running'
            """,
            (
                [fence.key.tenant for fence in fences],
                [fence.key.user_id for fence in fences],
                [fence.key.run_id for fence in fences],
                [fence.attempt for fence in fences],
            ),
        )
        return {n for (n,) in await cursor.fetchall()}
