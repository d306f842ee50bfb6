"""One client's stream of one run: gapless where the journal is, honest about holes where it is not, ended for certain.

A reader drops what is at or below its cursor. When ids jump, it takes what the journal has in between, and announces by
one ``resync`` that token deltas are missing if a hole remains. When PostgreSQL has more than Redis shows, it goes on from
the journal. Nothing follows ``end``.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, TypeVar

import psycopg

from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams import journal
from sandfleet.shared.streams.entry import START, Event, EventId, parse_cursor
from sandfleet.shared.streams.hub import Hub, Subscription
from sandfleet.shared.streams.journal import Head

_PAGE = 500  # journal rows per query
_T = TypeVar("_T")


class StreamEvent(NamedTuple):
    """An event as a client gets it. ``data`` is JSON text; ``id`` is None where a client cannot resume from."""

    id: str | None
    event: str
    data: str


State = Callable[[RunKey], Awaitable[str]]
"""Gives a run's current state as JSON text ``{"run_id", "status", "values"}``; raises NotFound when the run is gone."""


async def follow(
    hub: Hub,
    key: RunKey,
    cursor: str | None,
    *,
    state: State,
    live_only: bool = False,
    window_s: float = 0.0,
    fresh: bool = False,
) -> AsyncGenerator[StreamEvent]:
    """The events of a run after ``cursor`` (see ``parse_cursor``), up to and including its ``end``.

    ``live_only`` ignores the cursor and starts with what comes from now on; of a run that has ended it gives ``end``.
    ``window_s`` above 0 ends the stream after that time, without ``end``; the client resumes by its last id.
    ``fresh`` says that this caller has just made the run, which saves a look at PostgreSQL; without it a key that names no
    run of this owner gives nothing but ``end``. A run that vanishes gives ``end`` (without id), too; a client whose
    cursor is that of the ``end`` itself has everything, and its stream ends at once.

    Never raises for an outage of Redis or PostgreSQL: it goes on when they are back.
    """
    follower = _Follower(hub, key, parse_cursor(cursor), state)
    try:
        async for page in follower.pages(live_only, window_s, fresh):
            for event in page:
                yield event
    finally:
        follower.close()


class _WindowOver(Exception):
    pass


class _Follower:
    def __init__(self, hub: Hub, key: RunKey, cursor: EventId, state: State) -> None:
        self._hub = hub
        self._key = key
        self._state = state
        self._cursor = cursor
        self._subscription: Subscription | None = None
        self._ended = False
        self._resynced = False  # within one jump
        self._joined_midway = False  # whatever comes first is no hole
        self._deadline: float | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._subscription is not None:
            self._subscription.close()

    async def pages(self, live_only: bool, window_s: float, fresh: bool) -> AsyncIterator[list[StreamEvent]]:
        loop = asyncio.get_running_loop()
        if window_s > 0:
            self._deadline = loop.time() + window_s
        try:
            if not fresh:
                async for page in self._open(live_only):
                    yield page
            if not self._ended:
                async for page in self._live():
                    yield page
        except _WindowOver:
            return
        except NotFound:
            yield [StreamEvent(None, "end", "null")]

    async def _open(self, live_only: bool) -> AsyncIterator[list[StreamEvent]]:
        """What is there already."""
        head = await self._insist(partial(journal.look, self._hub.pool, self._key))
        if head is None:
            raise NotFound("There is no such run.")
        if not live_only:
            async for page in self._reread():
                yield page
            if head.ended:
                async for page in self._catch_up(head):
                    yield page
        elif head.ended:
            yield self._close_with(head, repeat=True)
        else:
            self._cursor = max(head.id, await self._hub.top(self._key))
            self._joined_midway = True

    async def _live(self) -> AsyncIterator[list[StreamEvent]]:
        loop = asyncio.get_running_loop()
        subscription = self._subscription = self._hub.subscribe(self._key, self._cursor)
        if self._deadline is not None:
            self._timers.append(loop.call_at(self._deadline, subscription.notify))
        behind_since: float | None = None
        while True:
            if subscription.lost:
                subscription.resume()
                async for page in self._reread():
                    yield page
            async for page in self._accept(subscription.take()):
                yield page
            if self._ended:
                return
            self._check_window()
            if subscription.vanished:
                raise NotFound("The run was deleted.")
            head = subscription.head
            if head is None or (head.id <= self._cursor and not head.ended):
                behind_since = None
            elif self._hub.redis_up and behind_since is None:
                behind_since = loop.time()
                self._timers = [timer for timer in self._timers if timer.when() > behind_since]
                self._timers.append(loop.call_later(self._hub.grace_s, subscription.notify))
            elif not self._hub.redis_up or loop.time() >= (behind_since or 0.0) + self._hub.grace_s - 0.001:
                behind_since = None
                subscription.head = None  # the next look brings it again if anything is left
                async for page in self._overtake(head):
                    yield page
                if self._ended:
                    return
                continue
            await subscription.wait()

    async def _overtake(self, head: Head) -> AsyncIterator[list[StreamEvent]]:
        """PostgreSQL has more than the live stream gave: look once more in Redis, then take the journal's."""
        if self._hub.redis_up:
            async for page in self._reread():
                yield page
        async for page in self._catch_up(head):
            yield page

    async def _catch_up(self, head: Head) -> AsyncIterator[list[StreamEvent]]:
        """Go on from the journal, after all that Redis has."""
        if not self._ended:
            self._resynced = False
            async for page in self._fill(EventId(head.id.attempt, head.id.seq + 1)):
                yield page
        if not self._ended and head.ended:
            yield self._close_with(head, repeat=False)

    def _close_with(self, head: Head, *, repeat: bool) -> list[StreamEvent]:
        """End the stream of a run that has ended, for a cursor at or beyond its end."""
        self._ended = True
        if self._cursor == head.id and not repeat:
            return []
        return [StreamEvent(str(head.id) if head.id != START else None, "end", "null")]

    async def _reread(self) -> AsyncIterator[list[StreamEvent]]:
        """What Redis has after the cursor."""
        after: EventId | None = self._cursor
        while after is not None and not self._ended:
            events, after = await self._hub.reread(self._key, after)
            async for page in self._accept(events):
                yield page
            self._check_window()

    async def _accept(self, events: list[Event]) -> AsyncIterator[list[StreamEvent]]:
        """Events of the stream, in its order."""
        out: list[StreamEvent] = []
        for event in events:
            if self._ended:
                break
            if event.id <= self._cursor:
                continue
            if self._jumps_to(event.id):
                if out:
                    yield out
                    out = []
                self._resynced = False
                async for page in self._fill(event.id):
                    yield page
                if self._ended:
                    break
                await self._note_hole(event.id, out)
            out.append(self._emit(event))
        if out:
            yield out

    async def _fill(self, before: EventId) -> AsyncIterator[list[StreamEvent]]:
        """What the journal has after the cursor and before an id."""
        while not self._ended:
            rows = await self._insist(
                partial(journal.events_between, self._hub.pool, self._key, self._cursor, before, _PAGE)
            )
            out: list[StreamEvent] = []
            for event in rows:
                await self._note_hole(event.id, out)
                out.append(self._emit(event))
                if self._ended:
                    break
            if out:
                yield out
            if len(rows) < _PAGE:
                return

    def _jumps_to(self, event_id: EventId) -> bool:
        """Whether anything may lie between the cursor and this id."""
        cursor = self._cursor
        if event_id.attempt == cursor.attempt:
            return event_id.seq != cursor.seq + 1
        return cursor != START or event_id != (1, 0)

    async def _note_hole(self, event_id: EventId, out: list[StreamEvent]) -> None:
        """Announce, before the first event behind it, that events are missing: once per jump, so that a client that is
        cut off in between is told again."""
        cursor = self._cursor
        expected = cursor.seq + 1 if event_id.attempt == cursor.attempt else 0
        if event_id.seq == expected or self._resynced:
            return
        if self._joined_midway:
            return
        self._resynced = True
        out.append(StreamEvent(None, "resync", await self._insist(partial(self._state, self._key))))

    def _emit(self, event: Event) -> StreamEvent:
        self._cursor = event.id
        self._joined_midway = False
        if self._subscription is not None:
            self._subscription.cursor = event.id
        self._ended = event.event == "end"
        return StreamEvent(str(event.id), event.event, event.data)

    async def _insist(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask PostgreSQL until it answers."""
        backoff_s = 0.05
        while True:
            try:
                return await ask()
            except psycopg.OperationalError:
                self._check_window()
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, 1.0)

    def _check_window(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            raise _WindowOver


_ALWAYS = frozenset({"metadata", "error", "end", "resync"})


async def filter_modes(
    events: AsyncGenerator[StreamEvent], modes: Collection[str]
) -> AsyncGenerator[StreamEvent]:
    """Only the events of the given stream modes, by the SDK's names; no modes means all.

    An event belongs to the mode of its name up to ``|`` (a subgraph's namespace follows it); ``messages`` belongs to
    ``messages-tuple``, and ``messages/…`` to ``messages``. ``metadata``, ``error``, ``end`` and ``resync`` always pass.
    Apply it after ``follow``: continuity is judged on the whole stream. Closing it closes ``events``.
    """
    wanted = frozenset(modes)
    async with aclosing(events):
        async for event in events:
            name = event.event.partition("|")[0]
            if name == "messages":
                name = "messages-tuple"
            elif name.startswith("messages/"):
                name = "messages"
            if not wanted or name in wanted or name in _ALWAYS:
                yield event
