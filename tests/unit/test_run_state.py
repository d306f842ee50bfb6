"""The state machine of a run: what may follow what."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.shared.run_state import (
    TERMINAL,
    Event,
    Gate,
    InvalidTransition,
    RunState,
    Status,
    reachable,
    step,
)

events = st.lists(st.tuples(st.sampled_from(Event), st.sampled_from(sorted(TERMINAL))), max_size=30)
starts = st.sampled_from([RunState(gate=gate) for gate in (None, *Gate)])


def play(state: RunState, happened: list[tuple[Event, Status]]) -> list[RunState]:
    """All states on the way; events that cannot happen leave the state as it is."""
    states = [state]
    for event, outcome in happened:
        with suppress(InvalidTransition):
            state = step(state, event, outcome)
        states.append(state)
    return states


@given(starts, events)
def test_nothing_follows_a_terminal_state(start, happened):
    """Red when `step` lets an event through after the end, as a late cancel or a zombie's finish."""
    states = play(start, happened)
    ends = [s for s in states if s.is_terminal]
    assert len(set(ends)) <= 1


@given(starts, events)
def test_the_attempt_never_falls(start, happened):
    """Red when handing over or an expired lease gives the fencing token back."""
    attempts = [s.attempt for s in play(start, happened)]
    assert attempts == sorted(attempts)


@given(starts, events)
def test_only_a_pending_run_waits_at_a_gate(start, happened):
    """Red when a claim passes a run that still waits for its thread."""
    assert all(s.gate is None or s.status is Status.PENDING for s in play(start, happened))


@given(starts, events)
def test_whatever_happened_a_run_can_still_end(start, happened):
    """Red when a state has no way out, so that its thread would be busy for ever."""
    state = play(start, happened)[-1]
    assert state.is_terminal or step(state, Event.ENDED, Status.INTERRUPTED).is_terminal


@given(starts, events)
def test_every_state_on_the_way_is_reachable(start, happened):
    """Red when `reachable` forgets a transition: the database's tests rely on it."""
    assert all(reachable(start, state) for state in play(start, happened))


def test_a_run_cannot_be_finished_by_an_executor_that_gave_it_back():
    """Red when `FINISHED` is allowed for a pending run."""
    running = step(RunState(), Event.CLAIMED)
    with pytest.raises(InvalidTransition):
        step(step(running, Event.HANDED_OVER), Event.FINISHED, Status.SUCCESS)


def test_ending_from_outside_supersedes_the_executor():
    """Red when `ENDED` keeps the attempt: the executor's writes would still pass the fence."""
    running = step(RunState(), Event.CLAIMED)
    assert step(running, Event.ENDED, Status.INTERRUPTED).attempt == running.attempt + 1
