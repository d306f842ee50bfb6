"""The decision about a pool's size, whatever the load."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandfleet.shared.scaling.decision import Load, Memory, Policy, decide, to_retire
from sandfleet.shared.scaling.settings import ScalerSettings, Target

NOW = 1_000_000.0
DEFAULT = ScalerSettings().policy(Target(service="c/s", least=0, most=50, slots=16))  # type: ignore[call-arg]

durations = st.floats(0, 1000)
policies = st.builds(
    lambda least, room, **rest: Policy(least=least, most=least + room, **rest),
    least=st.integers(0, 5),
    room=st.integers(1, 50),
    slots=st.integers(1, 100),
    age_s=durations,
    drain_s=st.floats(1, 1000),
    fill=st.floats(0.1, 1),
    pause_s=durations,
    in_after_s=durations,
    run_s=st.floats(0.1, 1000),
)
memories = st.builds(
    Memory,
    out_at_s=st.none() | st.floats(NOW - 1000, NOW),
    low_since_s=st.none() | st.floats(NOW - 1000, NOW),
    low_peak=st.integers(0, 60),
)
counts = st.integers(0, 5000)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    executors = draw(st.integers(0, 60))
    slots = executors * draw(st.integers(1, 100))
    ready = draw(counts)
    return Load(
        at_s=NOW,
        ready=ready,
        oldest_s=draw(durations) if ready else 0.0,
        executors=executors,
        idle=draw(st.integers(0, executors)),
        slots=slots,
        busy=draw(st.integers(0, slots)),
        run_s=draw(st.none() | st.floats(0, 1000)),
        hosts_taken=draw(st.floats(0, 60)),
        hosts_wanted=draw(st.floats(0, 60)),
        room_wait_s=draw(durations),
    )


@given(policies, loads(), st.integers(0, 60), memories, counts, durations, st.floats(0, 60), durations)
def test_more_and_older_work_never_means_fewer_executors(
    policy: Policy,
    load: Load,
    desired: int,
    memory: Memory,
    more: int,
    older_s: float,
    hosts: float,
    wait_s: float,
) -> None:
    """Monotone in the backlog, its age, and the sandboxes that wait for room."""
    loaded = replace(
        load,
        ready=load.ready + more,
        oldest_s=load.oldest_s + older_s if load.ready + more else 0.0,
        hosts_wanted=load.hosts_wanted + hosts,
        room_wait_s=load.room_wait_s + wait_s,
    )
    assert decide(policy, loaded, desired, memory).desired >= decide(policy, load, desired, memory).desired


@given(policies, loads(), st.integers(0, 60), memories)
def test_a_pool_stays_within_its_bounds(policy: Policy, load: Load, desired: int, memory: Memory) -> None:
    """Whatever it was before, since the bounds may have been changed."""
    assert policy.least <= decide(policy, load, desired, memory).desired <= policy.most


@given(policies, loads(), st.integers(0, 60), memories)
def test_only_idle_executors_are_taken(policy: Policy, load: Load, desired: int, memory: Memory) -> None:
    """Red when a pool shrinks by what it has too much. (A lowered bound is an order.)"""
    desired = min(max(desired, policy.least), policy.most)
    assert desired - decide(policy, load, desired, memory).desired <= load.idle


@given(policies, loads(), st.integers(0, 60), memories)
def test_those_that_are_too_many_leave_enough(
    policy: Policy, load: Load, desired: int, memory: Memory
) -> None:
    """What stays has room for all runs, taken and ready, however many are let run out of work."""
    decision = decide(policy, load, desired, memory)
    assert decision.surplus >= 0
    kept = (decision.desired - decision.surplus) * policy.slots * policy.fill
    if decision.surplus:
        assert kept >= load.busy + load.ready or decision.desired - decision.surplus == policy.most


def test_a_pool_without_an_idle_executor_lets_some_run_out_of_work() -> None:
    """Runs are spread over all, so without this a pool would never shrink under a steady load. It goes on at once when those
    are idle."""
    load = Load(NOW, 0, 0.0, 8, 0, 128, 22, 30.0)
    low = Memory(low_since_s=NOW - DEFAULT.in_after_s, low_peak=2)
    first = decide(DEFAULT, load, 8, low)
    assert (first.desired, first.surplus) == (8, 6)
    second = decide(DEFAULT, replace(load, at_s=NOW + 10, idle=4), 8, first.memory)
    assert (second.desired, second.surplus) == (4, 2)
    third = decide(DEFAULT, replace(load, at_s=NOW + 20, idle=2, executors=4), 4, second.memory)
    assert (third.desired, third.surplus) == (2, 0)


def test_a_pool_shrinks_to_what_the_busiest_moment_of_its_patience_needed() -> None:
    """Red when only the last moment counts: the next burst would find too few."""
    calm = Load(NOW, 0, 0.0, 8, 8, 128, 0, 30.0)
    low = Memory(low_since_s=NOW - DEFAULT.in_after_s, low_peak=5)
    assert decide(DEFAULT, calm, 8, low).desired == 5


@given(policies, loads())
@example(replace(DEFAULT, least=0), Load(NOW, 1, 0.0, 0, 0, 0, 0, run_s=0.0))
def test_the_first_run_brings_the_first_executor(policy: Policy, load: Load) -> None:
    """From zero nobody waits for an age: red when the pool waits until the run is old enough, or believes that runs which
    took no time need nobody."""
    none = replace(load, executors=0, idle=0, slots=0, busy=0, ready=max(1, load.ready), oldest_s=0.0)
    assert decide(policy, none, 0, Memory()).desired >= 1


@given(policies, loads(), st.integers(0, 60), memories)
def test_nothing_ready_brings_nothing(policy: Policy, load: Load, desired: int, memory: Memory) -> None:
    """Runs that are capped, delayed or wait for their thread are not ready, so however many they are, the load is this."""
    desired = min(max(desired, policy.least), policy.most)
    calm = replace(load, ready=0, oldest_s=0.0, hosts_wanted=0.0, room_wait_s=0.0)
    assert decide(policy, calm, desired, memory).desired <= desired


def run(policy: Policy, levels: list[int], desired: int, every_s: float = 10.0) -> list[int]:
    """Counts over time under a demand of so many slots at each step, with a fleet that is there as soon as it is asked for."""
    memory, found = Memory(), []
    for step, demand in enumerate(levels):
        slots = desired * policy.slots
        busy = min(demand, slots)
        ready = demand - busy
        load = Load(
            at_s=NOW + step * every_s,
            ready=ready,
            oldest_s=every_s if ready else 0.0,
            executors=desired,
            idle=max(0, desired - -(-busy // policy.slots)),
            slots=slots,
            busy=busy,
            run_s=30.0,
        )
        decision = decide(policy, load, desired, memory)
        desired, memory = decision.desired, decision.memory
        found.append(desired)
    return found


def reversals(found: list[int]) -> int:
    """How often the direction of change turns."""
    steps = [b - a for a, b in itertools.pairwise(found) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(steps))


@settings(max_examples=40)
@given(st.integers(1, 600), st.lists(st.floats(0, 1), min_size=100, max_size=150), st.integers(0, 50))
def test_noise_moves_nothing(level: int, noise: list[float], desired: int) -> None:
    """Demand that stays between a level and as much more as `fill` leaves: the pool finds a size and keeps it. It grows, or
    shrinks, or shrinks too far once for not having seen the peak yet, and never after that. Red without `fill`, or without the
    memory of the peak."""
    top = max(level, int(level * (1 + DEFAULT.fill) / (2 * DEFAULT.fill)))
    found = run(DEFAULT, [level + round(n * (top - level)) for n in noise], desired)
    assert reversals(found) <= 1


@settings(max_examples=40)
@given(st.lists(st.integers(0, 800), min_size=60, max_size=120), st.integers(0, 50))
def test_a_pool_shrinks_no_more_often_than_its_patience_allows(levels: list[int], desired: int) -> None:
    """Under any demand at all, however it jumps. Red without the pause before shrinking."""
    found = run(DEFAULT, levels, desired)
    shrunk = [n for n, (a, b) in enumerate(itertools.pairwise(found), 1) if b < a]
    assert all((b - a) * 10.0 >= DEFAULT.in_after_s for a, b in itertools.pairwise(shrunk))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 800), min_size=60, max_size=120), st.integers(0, 50))
def test_a_pool_grows_no_more_often_than_its_pause_allows(levels: list[int], desired: int) -> None:
    """Red without the pause after growing."""
    found = run(replace(DEFAULT, pause_s=30.0), levels, desired)
    grown = [n for n, (a, b) in enumerate(itertools.pairwise(found), 1) if b > a]
    assert all((b - a) * 10.0 >= 30.0 for a, b in itertools.pairwise(grown))


@pytest.mark.parametrize(("run_s", "executors"), [(0.6, 1), (6.0, 7), (60.0, 63), (6000.0, 63)])
def test_a_backlog_of_short_runs_brings_few_executors(run_s: float, executors: int) -> None:
    """A thousand ready runs and no executor. Slots are shared for a minute; of runs that are longer each needs its own.
    Red when a slot is asked for each run."""
    policy = replace(DEFAULT, most=1000, drain_s=60.0)
    load = Load(NOW, 1000, 0.0, 0, 0, 0, 0, run_s)
    assert decide(policy, load, 0, Memory()).desired == executors


def test_what_has_been_asked_for_is_not_asked_for_again() -> None:
    """Executors take a minute to start, while the backlog is as it was. Red when the living ones are counted instead."""
    load = Load(NOW, 64, 60.0, 1, 0, 16, 16, 600.0)
    first = decide(DEFAULT, load, 1, Memory())
    assert first.desired == 5
    again = decide(DEFAULT, replace(load, at_s=NOW + 60), first.desired, first.memory)
    assert again.desired == 5


@given(counts, counts, counts)
def test_a_replacement_retires_no_more_than_there_are_new_ones_beside_the_old(
    alive: int, desired: int, surplus: int
) -> None:
    """Those that are wanted go on taking runs. Red when the decision's own surplus, which counts old and new, is retired on
    top of it; or when nobody is, which would keep the old ones for ever under a steady load."""
    retiring = to_retire(alive, desired, surplus, replacing=True)
    assert alive - retiring == min(alive, desired)


@given(counts, counts, counts)
def test_without_a_replacement_those_retire_that_are_too_many(alive: int, desired: int, surplus: int) -> None:
    retiring = to_retire(alive, desired, surplus, replacing=False)
    assert retiring == max(surplus, alive - desired, 0)


@given(loads())
def test_a_pool_waits_as_long_as_the_first_of_its_runs_whatever_it_waits_for(load: Load) -> None:
    """Red when a run that waits for a sandbox's room is left out: no alarm would bring a host."""
    assert load.wait_s == max(load.oldest_s, load.room_wait_s)


def test_slots_without_room_for_a_sandbox_are_not_free() -> None:
    """Red when hosts whose memory is taken look roomy, and are taken away."""
    load = Load(NOW, 0, 0.0, 4, 0, 256, 120, 300.0, hosts_taken=3.75, free=136)
    assert load.room == 16
    assert replace(load, hosts_taken=0.0).room == 136
    assert replace(load, hosts_wanted=1.0).room == 0


@pytest.mark.parametrize(("run_s", "hosts"), [(20.0, 6), (60.0, 16), (600.0, 16)])
def test_short_runs_share_the_room_that_they_wait_for(run_s: float, hosts: int) -> None:
    """As they share slots: within the drain time. Red when each brings room of its own, three times as much as is needed."""
    policy = replace(DEFAULT, slots=64)
    load = Load(NOW, 0, 0.0, 1, 0, 64, 30, run_s, hosts_taken=1.0, hosts_wanted=15.0, room_wait_s=30.0)
    assert decide(policy, load, 1, Memory()).desired == hosts
