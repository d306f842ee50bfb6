"""A minute of chaos. ``make chaos`` has as much of it as you like."""

from pathlib import Path

import pytest

from sandfleet.shared.fault_points import VARIABLE
from tests.chaos.schedule import APIS, EXECUTORS
from tests.chaos.session import SETTINGS, chaos
from tests.fixtures_stack import start_stack
from tests.projects.chaos.ladder import EFFECTS

PROJECT = Path(__file__).parent.parent / "projects" / "chaos" / "langgraph.json"
SEED = 288
RUNS = 300
HARM = 2
FAULTS_S = 60


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_nothing_is_lost_or_done_twice_in_a_minute_of_faults(engine: str, tmp_path: Path):
    """Red when a run never ends, ends wrongly, loses or repeats a step, a stream differs from its log, or anything is
    left behind: a fault every quarter of a second is enough to find most ways to break a promise."""
    effects = tmp_path / "effects.txt"
    points = tmp_path / "points"
    points.mkdir()
    env = {**SETTINGS, EFFECTS: str(effects), VARIABLE: str(points)}
    stack = await start_stack(
        engine, "chaos", project=PROJECT, executors=len(EXECUTORS), apis=len(APIS), **env
    )
    try:
        report = await chaos(stack, SEED, RUNS, effects, points, faults_s=FAULTS_S, harm=HARM, say=print)
    finally:
        removed = await stack.stop()
    assert report.problems == [], "\n".join(report.lines())
    assert removed == [], "had to be removed by force"
    assert report.faults, "no fault was carried out"
    print("\n".join(report.lines()))
