"""The record of requests that reached the provider: the newest ones, oldest first."""

import time
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from typing import Any

_KEPT = 50_000
_COUNTERS_KEPT = 10_000


@dataclass(slots=True)
class Arrival:
    """One request as the provider saw it.

    ``monotonic_s`` is CLOCK_MONOTONIC when its first byte was read, comparable with `time.monotonic` of every process
    on the same machine; ``wall_s`` is the Unix time of the same moment. ``turn`` is the turn it asked for, ``nth``
    counts the requests for that turn from 0 (retries). ``outcome``: ``open`` while it is being answered,
    ``answered``, ``status <n>``, ``dropped``, ``hanging``, ``client_closed`` when the client left before the end.
    ``traceparent`` is the header of that name.
    """

    monotonic_s: float
    wall_s: float
    id: str | None
    model: str
    turn: int
    nth: int
    stream: bool
    outcome: str = "open"
    traceparent: str | None = None


class Arrivals:
    """The newest 50,000 arrivals, and how often each turn of a conversation was asked for since it last succeeded."""

    def __init__(self) -> None:
        self._all: deque[Arrival] = deque(maxlen=_KEPT)
        self._asked: OrderedDict[object, int] = OrderedDict()

    def nth(self, conversation: object) -> int:
        """How many requests this turn of a conversation had before this one, and count this one."""
        count = self._asked.pop(conversation, 0)
        self._asked[conversation] = count + 1
        if len(self._asked) > _COUNTERS_KEPT:
            self._asked.popitem(last=False)
        return count

    def succeeded(self, conversation: object) -> None:
        """Start counting anew for this turn, so that the same prompt can be used again."""
        self._asked.pop(conversation, None)

    def record(
        self, monotonic_s: float, *, id: str | None, model: str, turn: int, nth: int, stream: bool
    ) -> Arrival:
        """Add and return an arrival; the caller sets its outcome."""
        wall_s = time.time() - (time.monotonic() - monotonic_s)
        arrival = Arrival(monotonic_s, wall_s, id, model, turn, nth, stream)
        self._all.append(arrival)
        return arrival

    def listed(self, id: str | None) -> list[dict[str, Any]]:
        """The arrivals, all or those with this correlation id, as JSON objects."""
        return [asdict(arrival) for arrival in self._all if id is None or arrival.id == id]

    def reset(self) -> None:
        """Forget everything."""
        self._all.clear()
        self._asked.clear()
