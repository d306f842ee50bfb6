"""The schedule of faults is a function of its seed."""

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.schedule import _WEIGHTS, EVERY_S, Kind, schedule

seeds = st.integers(min_value=0)


@given(seeds)
def test_a_seed_gives_the_same_faults_each_time(seed):
    """Red when anything but the seed decides: a failure could not be replayed."""
    assert list(islice(schedule(seed), 200)) == list(islice(schedule(seed), 200))


@given(seeds, seeds)
def test_different_seeds_give_different_faults(one, other):
    """Red when the seed is ignored."""
    same = list(islice(schedule(one), 50)) == list(islice(schedule(other), 50))
    assert same == (one == other)


@given(seeds)
def test_a_fault_comes_every_quarter_of_a_second(seed):
    """Red when faults come in clumps, or cease."""
    times = [fault.at_s for fault in islice(schedule(seed), 400)]
    assert times == [EVERY_S * n for n in range(1, 401)]


@given(seeds)
def test_what_is_stopped_goes_on_after_one_to_twenty_seconds(seed):
    """Red when a process stays stopped, or for so short a time that no lease runs out."""
    for fault in islice(schedule(seed), 2_000):
        assert fault.duration_s == 0 or 1 <= fault.duration_s <= 20
        assert (fault.duration_s > 0) == (fault.kind in (Kind.STOP, Kind.FREEZE, Kind.QUEUE_STOP))


def test_within_an_hour_each_kind_hits_each_of_its_targets():
    """Red when a kind of fault or a target is forgotten."""
    hit = {(fault.kind, fault.target) for fault in islice(schedule(1), 4 * 3600)}
    assert hit == {(kind, target) for kind, targets in _WEIGHTS for target in targets}
    assert {kind for kind, _ in hit} == set(Kind)
