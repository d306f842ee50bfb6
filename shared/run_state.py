"""The state machine of a run, as pure code.

The transactions in ``db/versions`` carry it out; their tests hold every step that the database takes against it.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class Status(StrEnum):
    """Where a run is in its life. The names are the LangGraph SDK's."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"


TERMINAL = frozenset({Status.SUCCESS, Status.ERROR, Status.TIMEOUT, Status.INTERRUPTED})
"""Nothing follows one of these."""


class Gate(StrEnum):
    """What a pending run waits for before an executor may take it."""

    TIME = "time"
    """Its delay."""
    THREAD = "thread"
    """Another run that holds the thread."""
    TENANT = "tenant"
    """A slot of the tenant."""
    CHILDREN = "children"
    """Runs that it started itself."""
    ROOM = "room"
    """A host with room for its sandbox."""


class Event(StrEnum):
    """What can happen to a run."""

    DUE = "due"
    THREAD_TAKEN = "thread_taken"
    SLOT_TAKEN = "slot_taken"
    CLAIMED = "claimed"
    LEASE_EXPIRED = "lease_expired"
    HANDED_OVER = "handed_over"
    OUT_OF_ROOM = "out_of_room"
    """No host had room for its sandbox."""
    ROOM_TAKEN = "room_taken"
    FINISHED = "finished"
    """By the executor that holds the lease."""
    ENDED = "ended"
    """By anybody else: a cancel before the claim, the poison limit, an overdue timeout."""


class InvalidTransition(ValueError):
    """The event cannot happen to a run in this state."""


@dataclass(frozen=True, slots=True)
class RunState:
    """``attempt`` is the fencing token: it never falls, and only a claim or an end from outside raises it."""

    status: Status = Status.PENDING
    gate: Gate | None = None
    attempt: int = 0

    @property
    def is_terminal(self) -> bool:
        return self.status in TERMINAL


_PASSES = {
    (Gate.TIME, Event.DUE): Gate.THREAD,
    (Gate.THREAD, Event.THREAD_TAKEN): Gate.TENANT,
    (Gate.TENANT, Event.SLOT_TAKEN): None,
    (Gate.CHILDREN, Event.SLOT_TAKEN): None,
    (Gate.ROOM, Event.ROOM_TAKEN): Gate.TENANT,
}


def step(state: RunState, event: Event, outcome: Status | None = None) -> RunState:
    """The state after ``event``. ``outcome`` is the terminal status of `Event.FINISHED` and `Event.ENDED`.

    Raises InvalidTransition when the event cannot happen in this state.
    """
    if state.is_terminal:
        raise InvalidTransition(f"{event} after {state.status}: a terminal state is the last one")
    if event in (Event.FINISHED, Event.ENDED):
        if outcome not in TERMINAL:
            raise InvalidTransition(f"{event} needs a terminal outcome, not {outcome}")
        if event is Event.FINISHED and state.status is not Status.RUNNING:
            raise InvalidTransition("only the executor that runs a run can finish it")
        return RunState(outcome, None, state.attempt + (event is Event.ENDED))
    if state.status is Status.RUNNING:
        if event in (Event.LEASE_EXPIRED, Event.HANDED_OVER):
            return replace(state, status=Status.PENDING)
        if event is Event.OUT_OF_ROOM:
            return replace(state, status=Status.PENDING, gate=Gate.ROOM)
    elif event is Event.CLAIMED and state.gate is None:
        return replace(state, status=Status.RUNNING, attempt=state.attempt + 1)
    elif state.gate is not None and (state.gate, event) in _PASSES:
        return replace(state, gate=_PASSES[state.gate, event])
    raise InvalidTransition(f"{event} cannot happen to a run that is {state.status} at gate {state.gate}")


def reachable(before: RunState, after: RunState) -> bool:
    """Whether ``after`` can follow ``before`` by any number of events."""
    seen = {before}
    frontier = [before]
    while frontier:
        state = frontier.pop()
        if state == after:
            return True
        for event in Event:
            for outcome in TERMINAL if event in (Event.FINISHED, Event.ENDED) else (None,):
                try:
                    following = step(state, event, outcome)
                except InvalidTransition:
                    continue
                if following.attempt <= after.attempt and following not in seen:
                    seen.add(following)
                    frontier.append(following)
    return False
