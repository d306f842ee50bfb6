"""Event ids, the cursors that clients send back, and the codec of one entry of a run's Redis stream.

One entry is one flush of one attempt: its id is the id of its last event, its payload holds all events of the flush.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import orjson

FIELD = "e"  # the one field of an entry
_LARGEST = 2**31 - 1  # attempt and seq are `int` in PostgreSQL
_CURSOR = re.compile(r"([0-9]{1,20})-([0-9]{1,20})", re.ASCII)


class EventId(NamedTuple):
    """Id of an event: the attempt that emitted it and its place in that attempt, from 0 without gaps.

    Ids are ordered as tuples. On the wire, and as ids in Redis, they are written ``{attempt}-{seq}``.
    """

    attempt: int
    seq: int

    def __str__(self) -> str:
        return f"{self.attempt}-{self.seq}"


START = EventId(0, -1)
"""Before every event: attempts begin at 1."""


class Event(NamedTuple):
    """One event of a run; ``data`` is JSON text."""

    id: EventId
    event: str
    data: str


def stream_key(run_id: UUID) -> str:
    """Redis key of a run's stream."""
    return f"sf:run:{run_id}"


def parse_cursor(text: str | None) -> EventId:
    """The event after which a client wants to go on; never raises.

    - ``"3-17"``: after event 17 of attempt 3.
    - ``"-1"``, ``"0"``, empty, None, an attempt of 0 and anything that is no id: everything from the start.
    - A cursor beyond the run's events is taken at its word: nothing at or below it is sent again, and the reader of a
      run that has ended gets its ``end`` all the same. So a cursor from another run never hangs a stream.
    """
    match = _CURSOR.fullmatch(text or "")
    if match is None:
        return START
    attempt, seq = (min(int(part), _LARGEST) for part in match.groups())
    return EventId(attempt, seq) if attempt > 0 else START


def encode(events: Sequence[tuple[int, str, bytes]]) -> bytes:
    """Payload of an entry from (seq, event, data as JSON in UTF-8), in order of seq."""
    return orjson.dumps([(seq, event, data.decode(errors="replace")) for seq, event, data in events])


def decode(entry_id: bytes, payload: bytes) -> list[Event]:
    """Events of an entry. Raises ValueError if it is not one of ours."""
    attempt = int(entry_id.partition(b"-")[0])
    return [Event(EventId(attempt, seq), event, data) for seq, event, data in orjson.loads(payload)]


def parse_entry_id(entry_id: bytes) -> EventId:
    """The id of an entry's last event."""
    attempt, _, seq = entry_id.partition(b"-")
    return EventId(int(attempt), int(seq))
