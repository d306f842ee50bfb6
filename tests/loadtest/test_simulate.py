"""The simulator does what it says, and runs the decision that ships."""

import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from sandfleet.loadtest.percentile import percentile
from sandfleet.loadtest.simulate.step_scaling import StepScaling
from sandfleet.loadtest.simulate.target_tracking import TargetTracking, backlog_per_task, cpu
from sandfleet.loadtest.simulate.traces import MEAN_RUN_S, Run, Trace, arrivals, duration_s
from sandfleet.loadtest.simulate.world import Asked, Machine, View, World
from sandfleet.localstack.cli import app
from sandfleet.localstack.commands import simulate as command
from sandfleet.localstack.commands.simulate import Shipped
from sandfleet.shared.scaling.settings import ScalerSettings, Target

MACHINE = Machine("small", 2, (30.0, 60.0), 1.0)


class Fixed:
    """Asks for so many, from so many seconds on."""

    every_s = 10.0

    def __init__(self, *counts: tuple[float, int]) -> None:
        self._counts = counts

    def __call__(self, view: View) -> Asked:
        return [Asked(count) for from_s, count in self._counts if view.at_s >= from_s][-1]


def batch(*durations_s: float, at_s: float = 0.0, tenant: str = "a") -> list[Run]:
    return [Run(at_s, duration, tenant) for duration in durations_s]


def test_runs_wait_for_a_slot_in_order() -> None:
    """Red when a slot is used twice, or a wait is counted from anywhere but the arrival."""
    outcome = World(Trace("t", 100.0, batch(10.0, 20.0, 5.0, 5.0)), MACHINE, Fixed((0, 1))).run()
    assert outcome.waits_s == [0.0, 0.0, 10.0, 15.0]


def test_executors_start_late_and_are_paid_for_from_the_beginning() -> None:
    """Red when one works before it is up, or its start is free."""
    outcome = World(Trace("t", 100.0, batch(1.0)), MACHINE, Fixed((0, 1)), start=0).run()
    (wait_s,) = outcome.waits_s
    assert 40 <= wait_s <= 70  # a look after 10 s, then a start of 30 to 60 s
    assert outcome.machine_s == pytest.approx(90.0, abs=10.1)


def test_a_busy_executor_is_not_stopped() -> None:
    """As with scale-in protection. Red when its run is lost, or it is kept after that."""
    outcome = World(Trace("t", 500.0, batch(200.0)), MACHINE, Fixed((0, 1), (50, 0))).run()
    assert outcome.waits_s == [0.0]
    assert outcome.machine_s == pytest.approx(200.0)


def test_an_executor_that_is_too_many_takes_nothing_more_and_goes_when_it_is_idle() -> None:
    """Red when runs keep it busy for ever, as they do when they are spread over all."""

    class Fewer(Fixed):
        def __call__(self, view: View) -> Asked:
            asked = super().__call__(view)
            return Asked(asked.desired, view.executors - asked.desired)

    endless = sorted(Run(n / 10, 10.0) for n in range(10_000))
    trace, machine = Trace("t", 1000.0, endless), Machine("m", 100, (0.0, 0.0), 1.0)
    kept = World(trace, machine, Fixed((0, 3), (100, 2)), start=3).run()
    fewer = World(trace, machine, Fewer((0, 3), (100, 2)), start=3).run()
    assert kept.timeline[-1][1] == 3
    assert fewer.timeline[-1][1] == 2
    assert set(fewer.waits_s) == {0.0}


def test_a_capped_tenants_runs_are_not_ready() -> None:
    """They wait at their cap, which is no wait for executors. Red when they take every slot, or are seen as a backlog."""
    seen: list[int] = []

    class Watching(Fixed):
        def __call__(self, view: View) -> Asked:
            seen.append(view.ready)
            return super().__call__(view)

    capped = Trace("t", 10.0, batch(*[100.0] * 20, tenant="capped"), {"capped": 1})
    outcome = World(capped, MACHINE, Watching((0, 1))).run()
    assert len(outcome.waits_s) == 20
    assert set(outcome.waits_s) == {0.0}
    assert set(seen) == {0}


def test_durations_are_heavy_tailed_around_their_mean() -> None:
    random = Random(7)
    found = sorted(duration_s(random) for _ in range(50_000))
    assert sum(found) / len(found) == pytest.approx(MEAN_RUN_S, rel=0.1)
    assert found[25_000] < MEAN_RUN_S / 2
    assert found[-500] > 8 * MEAN_RUN_S


def test_arrivals_follow_their_rate_and_are_the_same_each_time() -> None:
    """So that tables can be compared. Red when they depend on anything but the seed."""

    def some() -> list[Run]:
        return list(arrivals(Random(1), 1000.0, lambda at_s: 8.0 if at_s < 500 else 2.0, 8.0))

    assert some() == some()
    early = sum(run.at_s < 500 for run in some())
    assert early == pytest.approx(4000, rel=0.1)
    assert len(some()) - early == pytest.approx(1000, rel=0.2)


def view(at_s: float, busy_share: float = 0.0, ready: int = 0, desired: int = 2) -> View:
    slots = desired * 10
    return View(at_s, ready, 0.0, desired, 0, slots, int(slots * busy_share), 20.0, desired, busy_share)


def test_target_tracking_is_as_slow_as_that_of_aws() -> None:
    """Three minutes above the target, fifteen below nine tenths of it, in proportion."""
    policy = TargetTracking(cpu(1.0), 0.5, least=1, most=9)
    assert [policy(view(60.0 * n, 1.0)).desired for n in range(3)] == [2, 2, 4]
    policy = TargetTracking(cpu(1.0), 0.5, least=1, most=9)
    assert [policy(view(60.0 * n, 0.2)).desired for n in range(15)] == [2] * 14 + [1]
    policy = TargetTracking(backlog_per_task, 5.0, least=1, most=9)
    assert [policy(view(60.0 * n, 1.0, ready=30)).desired for n in range(3)] == [2, 2, 9]


def shipped(least: int) -> Shipped:
    settings = ScalerSettings.model_construct()
    return Shipped(settings.policy(Target(service="c/s", least=least, most=30, slots=16)), settings.every_s)


def burst(tenant: str) -> list[Run]:
    random = Random(3)
    return sorted(Run(300.0 + random.random() * 10, duration_s(random), tenant) for _ in range(400))


def test_a_burst_waits_less_for_the_decision_that_ships_than_for_the_cpu() -> None:
    """What it is for. Red when the shipped decision is none the better, or is not the one that runs here."""
    machine = Machine("m", 16, (30.0, 60.0), 1.0)
    trace = Trace("burst", 1800.0, burst("a"))
    ours = World(trace, machine, shipped(1)).run()
    theirs = World(trace, machine, TargetTracking(cpu(0.6), 0.42, least=1, most=30)).run()
    assert percentile(ours.waits_s, 95) < percentile(theirs.waits_s, 95) / 2
    assert len(ours.waits_s) == len(theirs.waits_s) == 400


def test_a_capped_tenants_burst_brings_no_executor() -> None:
    machine = Machine("m", 16, (30.0, 60.0), 1.0)
    outcome = World(Trace("capped", 1800.0, burst("capped"), {"capped": 10}), machine, shipped(1)).run()
    assert (outcome.peak, outcome.changes) == (1, 0)


def test_the_command_prints_a_table_per_fleet_and_draws_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tasks under five policies, two kinds of hosts under seven. Red when a policy or a trace is missing, or hosts are not drawn."""
    small = [Trace("some runs", 200.0, batch(*[5.0] * 100)), Trace("a long one", 100.0, batch(50.0))]
    monkeypatch.setattr(command, "traces", lambda: small)
    done = CliRunner().invoke(app, ["simulate", "--plot", str(tmp_path / "plot.svg")])
    assert done.exit_code == 0, done.output
    rows = [line for line in done.output.splitlines() if re.match(r"\| .* \d+ \|$", line)]
    assert len(rows) == 2 * 5 + 2 * 2 * 7
    assert all(math.isfinite(float(cell)) for row in rows for cell in row.split("|")[3:-1])
    tasks, hosts = ((tmp_path / name).read_text() for name in ("plot.svg", "plot-hosts.svg"))
    assert "</svg>" in tasks
    assert "</svg>" in hosts
    assert tasks != hosts


@pytest.mark.long
def test_the_tables_of_the_documentation_are_what_the_command_prints() -> None:
    """Those of tasks and of hosts, line by line. Red when a policy, a trace or the simulator is changed and they are not."""
    done = CliRunner().invoke(app, ["simulate"])
    assert done.exit_code == 0, done.output
    tables = done.output.split("\n\n")[1::2]
    assert len(tables) == 3
    documented = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    for printed in tables[:2]:
        assert [line for line in printed.strip().splitlines() if line not in documented] == []


def test_warm_machines_start_sooner_and_are_replaced() -> None:
    """Red when more start from stand-by than there are, or one that was taken never comes back."""
    machine = Machine("m", 1, (90.0, 90.0), 1.0, warm=1, warm_start_s=(30.0, 30.0))
    two, later = batch(5.0, 5.0), batch(5.0, at_s=1000.0)
    outcome = World(
        Trace("t", 1100.0, [*two, *later]), machine, Fixed((0, 2), (500, 0), (990, 1)), start=0
    ).run()
    assert outcome.waits_s == [
        40.0,
        45.0,
        20.0,
    ]  # of a look each 10 s; the second run gets the first one's slot


STEPS = ((0.0, 1), (15.0, 2), (55.0, 4))
HOST = Machine("host", 64, (90.0, 90.0), 1.0, sandboxes=30)


def steadily(in_flight: int, length_s: float) -> Trace:
    """About so many runs at once, of 300 s each."""
    return Trace(
        "steady",
        length_s,
        sorted(Run(n * 300.0 / in_flight, 300.0) for n in range(int(length_s * in_flight / 300))),
    )


def test_hosts_come_for_sandboxes_that_find_no_room_though_slots_are_free() -> None:
    """By alarms and by the decision alike. Red when either looks at ready runs alone: those wait for ever."""
    parameters = ScalerSettings.model_construct().policy(Target(group="g", least=1, most=9, slots=64))
    for policy in (StepScaling(5.0, STEPS, slots=64, least=1, most=9), Shipped(parameters, 10.0)):
        outcome = World(steadily(100, 3600.0), HOST, policy).run()
        assert outcome.peak >= 4  # 100 sandboxes of 30 a host
        late = outcome.waits_s[len(outcome.waits_s) // 2 :]
        assert max(late) == 0.0, type(policy).__name__


def test_a_pool_that_shrinks_by_alarms_stops_at_what_it_needs() -> None:
    """Hosts that retire have free slots for nobody. Red when those keep the alarm on: all but one would be retired."""
    policy = StepScaling(5.0, STEPS, slots=64, least=1, most=20)
    outcome = World(steadily(300, 4 * 3600.0), replace(HOST, sandboxes=None), policy, start=10).run()
    assert 5 <= outcome.timeline[-20][1] <= 6  # 300 of 64 each
    assert max(outcome.waits_s) < 120.0


def test_full_hosts_are_not_taken_for_roomy_ones() -> None:
    """Red when slots count that no sandbox has room for: hosts would go and come for ever."""
    policy = StepScaling(5.0, STEPS, slots=64, least=1, most=20)
    outcome = World(steadily(110, 4 * 3600.0), HOST, policy, start=4).run()
    assert outcome.changes == 0
