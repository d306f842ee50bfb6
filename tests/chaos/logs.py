"""What a follower must have seen of a run: a pure function from the run's journal and the events that came."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.chaos.followers import Seen


class Journalled(NamedTuple):
    """A row of the journal."""

    attempt: int
    seq: int
    event: str
    data: str


def stream_problems(journal: Sequence[Journalled] | None, seen: Sequence[Seen]) -> list[str]:
    """Whether the stream was the run's log, in order, once: each journalled event, and no hole that is not announced.

    ``journal`` is in order, and None when the run was undone, which takes it away.
    """
    ids = [_parse(event.id) for event in seen if event.id]
    problems = []
    if ids != sorted(set(ids)):
        problems.append(f"ids are repeated or out of order: {[e.id for e in seen]}")
    if not seen or seen[-1].event != "end" or [e.event for e in seen].count("end") != 1:
        problems.append(f"the stream did not end once: {[e.event for e in seen]}")
    if journal is None:
        return problems
    by_id = {_parse(event.id): event for event in seen if event.id}
    for row in journal:
        event = by_id.get((row.attempt, row.seq))
        if event is None:
            problems.append(f"{row.attempt}-{row.seq} {row.event} is in the journal and was not seen")
        elif (event.event, event.data) != (row.event, row.data):
            problems.append(f"{event.id} was seen as {event}, and journalled as {row}")
    return problems + _silent_holes(seen)


def _silent_holes(seen: Sequence[Seen]) -> list[str]:
    """A client that goes on from the journal is told once that what is not journalled may be missing in between."""
    problems = []
    attempt, seq, told = 0, -1, 0
    for event in seen:
        if event.event == "resync":
            told = event.connection
        if not event.id:
            continue
        at = _parse(event.id)
        if at[1] != (seq + 1 if at[0] == attempt else 0) and told != event.connection:
            problems.append(f"before {event.id} events are missing, and nothing says so")
        attempt, seq = at
    return problems


def _parse(event_id: str) -> tuple[int, int]:
    attempt, _, seq = event_id.partition("-")
    return int(attempt), int(seq)
