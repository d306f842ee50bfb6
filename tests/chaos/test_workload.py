"""The workload is a function of its seed, and asks for nothing that cannot be told apart afterwards."""

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.workload import RUNGS, threads
from tests.projects.chaos import ladder

seeds = st.integers(min_value=0)


@given(seeds, st.integers(min_value=1, max_value=300))
def test_a_seed_gives_the_same_workload_each_time_with_at_least_so_many_runs(seed, runs):
    """Red when anything but the seed decides, or the last thread is left out or one too many is made."""
    made = list(threads(seed, runs, sandboxes=True))
    assert made == list(threads(seed, runs, sandboxes=True))
    assert sum(map(len, made)) >= runs > sum(map(len, made[:-1]))


@given(seeds)
def test_each_run_can_be_told_by_its_salt(seed):
    """Red when two runs add the same entries to a log: one could stand in for the other."""
    salts = [climb.salt for thread in threads(seed, 300, sandboxes=True) for climb in thread.runs]
    assert len(salts) == len(set(salts))


@given(seeds)
def test_every_rung_that_a_climb_names_is_one_that_it_takes(seed):
    """Red when a run is to fail, ask or call a tool at a rung beyond its last one."""
    assert RUNGS == ladder.RUNGS
    for thread in threads(seed, 200, sandboxes=True):
        for climb in thread.runs:
            assert 1 <= climb.steps <= RUNGS
            named = [value for name, value in climb.input().items() if name.endswith("_at") and value]
            assert all(1 <= rung <= climb.steps for rung in named)
            assert climb.ask_at is None or len(thread.runs) == 1


def test_a_thousand_runs_have_some_of_every_kind():
    """Red when a kind of run is never asked for."""
    made = list(threads(1, 1_000, sandboxes=True))
    climbs = [climb for thread in made for climb in thread.runs]
    assert any(thread.commands for thread in made)
    for name in (
        "fail_at",
        "ask_at",
        "die_at",
        "fan_at",
        "note_at",
        "renote_at",
        "after_s",
        "cancel",
        "followed",
    ):
        assert any(getattr(climb, name) for climb in climbs), name
    assert {climb.strategy for climb in climbs} == {"enqueue", "interrupt", "rollback"}
    assert {climb.cancel.action for climb in climbs if climb.cancel} == {"interrupt", "rollback"}
    assert {climb.how for climb in climbs} == {"create", "wait"}
