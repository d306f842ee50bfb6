"""The verdict on a thread: what it must call wrong. A chaos test that overlooks these would pass over anything."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.chaos.expected import COUNTED, Ended, commands_problems, effects_problems, thread_problems
from tests.chaos.workload import Cancel, Climb, Commands
from tests.projects.chaos.ladder import digest_of

TWO = Climb("a", 2)
NO_EFFECTS: Counter[str] = Counter()


def state(log, leaves=0):
    return {"log": log, "digest": digest_of(log), "leaves": leaves}


def ended(climb, status="success", error=None, *, resumed=False):
    return Ended(climb, resumed, status, error)


def problems(runs, values, effects=NO_EFFECTS):
    return thread_problems(runs, values, effects)


def commands(results):
    shown = [f"{COUNTED}{result}" if isinstance(result, int) else result for result in results]
    return commands_problems(Commands("s", len(results)), shown)


def test_a_thread_whose_runs_came_one_after_the_other_is_right():
    runs = [ended(TWO), ended(Climb("b", 1)), ended(Climb("c", 3))]
    assert problems(runs, state(["a:1", "a:2", "b:1", "c:1", "c:2", "c:3"])) == []


@pytest.mark.parametrize(
    "log",
    [
        [],
        ["a:1"],
        ["a:1", "a:1", "a:2"],
        ["a:2", "a:1"],
        ["a:1", "a:2", "a:1", "a:2"],
        ["a:1", "a:2", "b:1"],
    ],
)
def test_a_rung_that_is_lost_repeated_or_out_of_order_is_wrong(log):
    assert problems([ended(TWO)], state(log))


def test_runs_in_another_order_than_that_of_their_acceptance_are_wrong():
    runs = [ended(TWO), ended(Climb("b", 1))]
    assert problems(runs, state(["b:1", "a:1", "a:2"]))


def test_a_delayed_run_comes_when_it_is_due():
    runs = [ended(Climb("d", 1, after_s=1.0)), ended(TWO), ended(Climb("b", 1))]
    assert problems(runs, state(["a:1", "a:2", "d:1", "b:1"])) == []
    assert problems(runs, state(["a:1", "a:2", "b:1"]))
    cut = ended(Climb("c", 1, cancel=Cancel(0, "interrupt", False)), "interrupted")
    assert problems([cut, *runs], state(["a:1", "a:2", "d:1", "b:1"])) == [], "c left nothing"


def test_a_digest_that_does_not_fit_the_log_is_wrong():
    values = {**state(["a:1", "a:2"]), "digest": digest_of(["a:1", "a:2", "a:2"])}
    assert problems([ended(TWO)], values)


@pytest.mark.parametrize("status", ["error", "timeout", "interrupted", None])
def test_a_run_that_nobody_cut_short_must_succeed(status):
    assert problems([ended(TWO, status)], state(["a:1", "a:2"]))


def test_a_run_that_is_to_fail_fails_with_its_own_error_at_its_own_rung():
    fails = Climb("f", 3, fail_at=3)
    right = {"error": "RuntimeError", "message": "rung 3 breaks as asked"}
    assert problems([ended(fails, "error", right)], state(["f:1", "f:2"])) == []
    assert problems([ended(fails, "error", right)], state(["f:1"]))
    assert problems([ended(fails)], state(["f:1", "f:2", "f:3"]))
    lost = {"error": "ExecutorLost", "message": ""}
    assert problems([ended(fails, "error", lost)], state(["f:1", "f:2"]))


def test_only_poison_ends_by_the_poison_limit():
    lost = {"error": "ExecutorLost", "message": ""}
    assert problems([ended(Climb("p", 2, die_at=2), "error", lost)], state(["p:1"])) == []
    assert problems([ended(Climb("p", 2, die_at=2), "error", lost)], state([])), (
        "a state behind its checkpoint"
    )
    assert problems([ended(TWO, "error", lost)], state(["a:1"]))


def test_a_cancelled_run_leaves_whole_rungs_from_its_first_or_has_succeeded():
    cut = Climb("c", 3, cancel=Cancel(0, "interrupt", False))
    for count in range(4):
        assert problems([ended(cut, "interrupted")], state([f"c:{n}" for n in range(1, count + 1)])) == []
    assert problems([ended(cut)], state(["c:1", "c:2", "c:3"])) == []
    assert problems([ended(cut)], state(["c:1"]))
    assert problems([ended(cut, "interrupted")], state(["c:2"]))
    assert problems([ended(cut, None)], state([])), "nobody asked to undo it"


def test_a_run_that_was_undone_leaves_nothing():
    undone = Climb("u", 2, cancel=Cancel(0, "rollback", False))
    assert problems([ended(undone, None)], state([])) == []
    assert problems([ended(undone, None), ended(TWO)], state(["u:1", "a:1", "a:2"]))


def test_a_later_run_may_interrupt_or_undo_an_earlier_one_and_no_other():
    assert (
        problems([ended(TWO, "interrupted"), ended(Climb("b", 1, strategy="interrupt"))], state(["b:1"]))
        == []
    )
    assert problems([ended(TWO, None), ended(Climb("b", 1, strategy="rollback"))], state(["b:1"])) == []
    assert problems([ended(TWO, None), ended(Climb("b", 1, strategy="interrupt"))], state(["b:1"]))
    assert problems([ended(Climb("b", 1, strategy="interrupt")), ended(TWO, "interrupted")], state(["b:1"]))


def test_a_question_is_answered_once_by_the_run_that_brings_the_answer():
    asks = Climb("q", 3, ask_at=2)
    runs = [ended(asks), ended(asks, resumed=True)]
    assert problems(runs, state(["q:1", "q:2:yes", "q:3"])) == []
    assert problems(runs, state(["q:1", "q:2:yes", "q:2:yes", "q:3"]))
    assert problems(runs, state(["q:1"]))


def test_the_leaves_of_a_fan_count_once_each():
    fan = Climb("l", 2, fan_at=2)
    assert problems([ended(fan)], state(["l:1", "l:2"], leaves=6)) == []
    assert problems([ended(fan)], state(["l:1", "l:2"], leaves=4))
    assert problems([ended(fan)], state(["l:1", "l:2"], leaves=12))


def test_a_run_that_was_cut_short_has_all_leaves_of_a_rung_or_none():
    cut = Climb("l", 3, fan_at=2, cancel=Cancel(0, "interrupt", False))
    for leaves in (0, 6):
        assert problems([ended(cut, "interrupted")], state(["l:1", "l:2"], leaves)) == []
    assert problems([ended(cut, "interrupted")], state(["l:1", "l:2"], leaves=2))
    assert problems([ended(cut, "interrupted")], state(["l:1", "l:2", "l:3"], leaves=0))


def test_the_line_of_a_noted_call_is_there_and_an_orphaned_one_says_so():
    notes = Climb("n", 1, note_at=1)
    assert problems([ended(notes)], state(["n:1:noted"]), Counter(["n:1"])) == []
    assert problems([ended(notes)], state(["n:1:orphaned"])) == []
    assert problems([ended(notes)], state(["n:1:noted"]))
    assert problems([ended(notes)], state(["n:1"]))


def test_only_a_tool_that_may_be_repeated_takes_effect_twice():
    notes = Climb("n", 1, note_at=1)
    twice = Counter(["n:1", "n:1"])
    assert effects_problems(twice, [notes])
    assert effects_problems(twice, [replace(notes, note_at=None, renote_at=1)]) == []


def test_each_command_counts_on_from_the_one_before():
    """A command that ran twice, and a workspace that was emptied without a word, are wrong."""
    assert commands([1, 2, 3]) == []
    assert commands([1, 3])
    assert commands([1, 1])
    assert commands([2])


def test_a_command_in_doubt_may_have_counted_or_not():
    for count in (2, 3):
        assert commands([1, "The call of execute was broken off", count]) == []
    assert commands([1, "The call of execute was broken off", 1])
    assert commands([1, "The call of execute was broken off", 4])


def test_a_loss_that_is_told_of_may_have_taken_back_any_part_of_the_count():
    for count in (1, 2, 3, 4):
        assert commands([1, 2, "sandbox_lost: its host is gone", count]) == []
    assert commands([1, 2, "sandbox_lost: its host is gone", 5])
    assert commands([1, 2, "sandbox_lost: its host is gone", 1, 3])


def test_each_command_has_a_result():
    assert commands_problems(Commands("s", 2), [f"{COUNTED}1"])
