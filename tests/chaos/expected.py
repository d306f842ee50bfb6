"""What must have come of a thread: pure functions from what was asked and what was found to a list of problems."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.workload import Climb, Commands
from tests.projects.chaos.ladder import LEAVES, digest_of

COUNTED = "exit code: 0\nstdout:\n"
"""Begins the result of a command that worked; what follows is its count."""

ANSWER = "yes"
POISON_ERROR = "ExecutorLost"


@dataclass(frozen=True, slots=True)
class Ended:
    """How an accepted run stands in the end. ``status`` is None when the run is gone; ``error`` as {error, message}."""

    climb: Climb
    resumed: bool
    status: str | None
    error: dict[str, str] | None = None


def thread_problems(runs: Sequence[Ended], values: dict[str, Any], effects: Counter[str]) -> list[str]:
    """Whether the runs of a thread, in the order of their acceptance, ended as they had to and left this state.

    ``values`` is the thread's newest state, ``effects`` how often each line stands in the tools' file.
    """
    problems = [problem for n, run in enumerate(runs) for problem in _status_problems(run, runs[n + 1 :])]
    log: list[str] = values.get("log", [])
    left = list(log)
    leaves = {0}
    for run in _in_turn(runs, log):
        left, climbed, problem = _climb(run, left)
        if problem:
            problems.append(problem)
        leaves = {before + more for before in leaves for more in _leaves(run, climbed)}
    if left:
        problems.append(f"the log goes on with {left}")
    if values.get("digest", 0) != digest_of(log):
        problems.append(f"the digest is {values.get('digest')}, not {digest_of(log)}, for {log}")
    if values.get("leaves", 0) not in leaves:
        problems.append(f"the leaves add up to {values.get('leaves', 0)}, not {sorted(leaves)}")
    return problems + _effect_problems(log, effects)


def _in_turn(runs: Sequence[Ended], log: Sequence[str]) -> list[Ended]:
    """The runs in the order of their turns: that of their acceptance, but a delayed one comes where the log has it."""

    def first(run: Ended) -> int:
        salt = f"{run.climb.salt}:"
        return next((n for n, entry in enumerate(log) if entry.startswith(salt)), len(log))

    turns = [run for run in runs if not run.climb.after_s]
    for run in runs:
        if run.climb.after_s:
            before = [n for n, other in enumerate(turns, 1) if first(other) < first(run)]
            turns.insert(max(before, default=0), run)
    return turns


def _complete(run: Ended) -> range:
    """The rungs of a run that nobody cuts short."""
    climb = run.climb
    if run.resumed:
        assert climb.ask_at is not None
        return range(climb.ask_at, climb.steps + 1)
    stops = [at for at in (climb.fail_at, climb.die_at, climb.ask_at) if at is not None]
    return range(1, min(stops) if stops else climb.steps + 1)


def _may_be_cut(run: Ended, later: Sequence[Ended]) -> set[str | None]:
    """The ends that the run may have had instead of its own: cancelled, or undone."""
    actions = {run.climb.cancel.action} if run.climb.cancel else set()
    actions |= {other.climb.strategy for other in later} - {"enqueue"}
    return {{"interrupt": "interrupted", "rollback": None}[action] for action in actions}


def _status_problems(run: Ended, later: Sequence[Ended]) -> list[str]:
    climb = run.climb
    fails = climb.fail_at is not None or climb.die_at is not None
    own = "error" if fails else "success"
    if run.status not in {own} | _may_be_cut(run, later):
        return [f"{climb.salt} is {run.status} with {run.error}, not {own}"]
    if run.status != "error":
        return []
    expected = (
        {"error": "RuntimeError", "message": f"rung {climb.fail_at} breaks as asked"}
        if climb.fail_at
        else None
    )
    if expected is None and run.error is not None and run.error["error"] == POISON_ERROR:
        return []
    return [] if run.error == expected else [f"{climb.salt} ended with {run.error}, not {expected}"]


def _climb(run: Ended, log: list[str]) -> tuple[list[str], int, str | None]:
    """Take the run's entries off the log: the rest, how many there were, and what is wrong with them."""
    rungs = _complete(run)
    climbed = 0
    for step in rungs:
        if climbed == len(log) or log[climbed] not in _entries(run.climb, step):
            break
        climbed += 1
    rest = log[climbed:]
    if run.status is None:
        problem = f"{run.climb.salt} was undone and left {log[:climbed]}" if climbed else None
    elif run.status != "interrupted" and climbed < len(rungs):
        problem = (
            f"{run.climb.salt} is {run.status} after {climbed} of {len(rungs)} rungs; then comes {rest[:2]}"
        )
    else:
        problem = None
    return rest, climbed, problem


def _entries(climb: Climb, step: int) -> list[str]:
    """What a rung may have added."""
    entry = f"{climb.salt}:{step}"
    if step == climb.ask_at:
        entry += f":{ANSWER}"
    if step == climb.renote_at:
        return [f"{entry}:noted"]
    if step == climb.note_at:
        return [f"{entry}:noted", f"{entry}:orphaned"]
    return [entry]


def _leaves(run: Ended, climbed: int) -> set[int]:
    """What a run may have added to ``leaves``."""
    fan_at = run.climb.fan_at
    rungs = _complete(run)[:climbed]
    if fan_at is None or run.status is None or fan_at not in rungs:
        return {0}
    cut = run.status == "interrupted" and rungs[-1] == fan_at  # between the rung and its leaves
    return {0, LEAVES * fan_at} if cut else {LEAVES * fan_at}


def _effect_problems(log: list[str], effects: Counter[str]) -> list[str]:
    """The line of a call that was noted is there; whether repeated calls are allowed the caller knows."""
    noted = (entry.removesuffix(":noted") for entry in log if entry.endswith(":noted"))
    return [f"{line} was noted without its line" for line in noted if not effects[line]]


def effects_problems(effects: Counter[str], climbs: Sequence[Climb]) -> list[str]:
    """No call that may not be repeated took effect twice."""
    repeatable = {f"{climb.salt}:{climb.renote_at}" for climb in climbs}
    return [
        f"{line} took effect {count} times"
        for line, count in effects.items()
        if count > 1 and line not in repeatable
    ]


def commands_problems(commands: Commands, results: Sequence[Any]) -> list[str]:
    """Whether each command counted on from the one before. Each adds one to a count that its sandbox keeps.

    A result that is no count says that it is in doubt (it may have added one, or not), or that the sandbox was lost, which may
    have taken back any of what was counted.
    """
    problems = []
    if len(results) != commands.count:
        problems.append(f"{commands.salt} has {len(results)} results of {commands.count}")
    least = most = 0  # what the count may be
    for number, result in enumerate(map(str, results), 1):
        if not result.startswith(COUNTED):
            least, most = (0 if result.startswith("sandbox_lost") else least), most + 1
            continue
        count = int(result.removeprefix(COUNTED))
        if not least < count <= most + 1:
            problems.append(
                f"{commands.salt}'s command {number} counted {count}, not from {least + 1} to {most + 1}"
            )
        least = most = count
    return [f"{problem}: {list(results)}" for problem in problems]
