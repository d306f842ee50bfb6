"""``sandfleet simulate``: policies of scaling on simulated fleets. The simulator knows nothing of ours; the decision that ships
is handed to it here."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from sandfleet.loadtest.simulate.report import Row, plot, table
from sandfleet.loadtest.simulate.step_scaling import StepScaling
from sandfleet.loadtest.simulate.target_tracking import TargetTracking, backlog_per_task, cpu
from sandfleet.loadtest.simulate.traces import Trace, traces
from sandfleet.loadtest.simulate.world import Asked, Machine, Policy, View, World
from sandfleet.localstack.terminal import err, out
from sandfleet.shared.scaling.decision import Load, Memory, decide
from sandfleet.shared.scaling.decision import Policy as Parameters
from sandfleet.shared.scaling.settings import ScalerSettings, Target

FARGATE_START_S = (30.0, 60.0)
HOST_START_S = (90.0, 90.0)
WARM_START_S = (30.0, 45.0)  # of a stopped host that has its images; assumed
_WARM = 2  # as `warmHosts`
_MOST = 40
_CPU_WHEN_FULL = 0.6  # of its CPU, by an executor with all slots taken
_CPU_TARGET = 0.48  # as full as `fill` leaves our own
_STEPS = ((0.0, 1), (15.0, 2), (55.0, 4))  # as infra_cdk has them
_TRIED = {
    "age_s": (2.0, 5.0, 15.0),
    "drain_s": (15.0, 60.0, 180.0),
    "pause_s": (0.0, 20.0, 60.0),
    "fill": (0.6, 0.8, 0.95),
    "in_after_s": (60.0, 300.0, 900.0),
}


class Shipped:
    """The decision of the scaler as a policy of the simulator."""

    def __init__(self, parameters: Parameters, every_s: float) -> None:
        self.every_s = every_s
        self._parameters = parameters
        self._memory = Memory()

    def __call__(self, view: View) -> Asked:
        load = Load(
            at_s=view.at_s,
            ready=view.ready,
            oldest_s=view.oldest_s,
            executors=view.executors,
            idle=view.idle,
            slots=view.slots,
            busy=view.busy,
            run_s=view.run_s,
            hosts_taken=view.hosts_taken,
            hosts_wanted=view.hosts_wanted,
            room_wait_s=view.room_wait_s,
        )
        decision = decide(self._parameters, load, view.desired, self._memory)
        self._memory = decision.memory
        return Asked(decision.desired, max(decision.surplus, view.executors - decision.desired))


def simulate(file: Path | None, *, try_others: bool, fargate_per_hour: float, host_per_hour: float) -> int:
    """Print the tables; write the plot of the tasks to ``file`` if one is named, and that of hosts beside it, with ``-hosts`` in
    its name. Returns an exit code."""
    machines = [
        Machine("Fargate tasks of 64 slots, ready after 30 to 60 s", 64, FARGATE_START_S, fargate_per_hour),
        hosts := Machine(
            "hosts of 64 slots, ready after 90 s",
            64,
            HOST_START_S,
            host_per_hour,
            warm=_WARM,
            warm_start_s=WARM_START_S,
        ),
        replace(hosts, name="hosts of 64 slots with room for 30 sandboxes, ready after 90 s", sandboxes=30),
    ]
    plots = {} if file is None else {machines[0]: file, hosts: file.with_stem(f"{file.stem}-hosts")}
    given = traces()
    if try_others:
        _print_others(given, machines[0])
        return 0
    for machine in machines:
        rows = [
            Row(trace.name, name, World(trace, of, make(), start=start).run())
            for trace in given
            for name, start, of, make in _policies(machine)
        ]
        _print(f"\n{machine.name}\n\n{table(rows, machine)}")
        if machine in plots:
            try:
                plot(rows, machine, plots[machine], f"Scaling policies on {machine.name}")
            except ImportError:
                err.print("The plot needs matplotlib, which `make install-dev` installs.")
                return 1
    return 0


def _print(text: str) -> None:
    out.print(text, markup=False)


def _parameters(machine: Machine, least: int) -> Parameters:
    settings = ScalerSettings.model_construct()
    return settings.policy(Target(service="c/s", least=least, most=_MOST, slots=machine.slots))


def _policies(machine: Machine) -> Iterator[tuple[str, int, Machine, Callable[[], Policy]]]:
    """Name, executors at the start, the machine with or without warm ones, and a maker of each."""
    defaults = ScalerSettings.model_construct()
    every_s, age_s, least = defaults.every_s, defaults.age_s, 1
    per_task = machine.slots * defaults.fill_fraction
    cold = replace(machine, warm=0)
    yield (
        "CPU",
        least,
        cold,
        lambda: TargetTracking(cpu(_CPU_WHEN_FULL), _CPU_TARGET, least=least, most=_MOST),
    )
    yield (
        "backlog per task",
        least,
        cold,
        lambda: TargetTracking(backlog_per_task, per_task, least=least, most=_MOST),
    )
    yield (
        "queue age, alarms",
        least,
        cold,
        lambda: StepScaling(age_s, _STEPS, slots=machine.slots, least=least, most=_MOST),
    )
    for of, stand_by in ((cold, ""), (machine, f", {machine.warm} warm"))[: 2 if machine.warm else 1]:
        yield (
            f"queue age, fast path{stand_by}",
            least,
            of,
            lambda: Shipped(_parameters(machine, least), every_s),
        )
        yield f"fast path, from zero{stand_by}", 0, of, lambda: Shipped(_parameters(machine, 0), every_s)


def _with(parameters: Parameters, name: str, value: float) -> Parameters:
    changed: dict[str, Any] = {name: value}
    return replace(parameters, **changed)


def _print_others(given: list[Trace], machine: Machine) -> None:
    """One parameter at a time, beside the defaults."""
    defaults = _parameters(machine, 1)
    every_s = ScalerSettings.model_construct().every_s
    rows = []
    tried = [(name, value) for name, values in _TRIED.items() for value in values]
    for trace, (name, value) in product(given, tried):
        marked = " (default)" if getattr(defaults, name) == value else ""
        policy = Shipped(_with(defaults, name, value), every_s)
        rows.append(Row(trace.name, f"{name} {value:g}{marked}", World(trace, machine, policy).run()))
    for trace in given:
        for every in (10.0, 60.0):
            outcome = World(trace, machine, Shipped(defaults, every)).run()
            rows.append(Row(trace.name, f"every_s {every:g}", outcome))
    rows.sort(key=lambda row: [trace.name for trace in given].index(row.trace))
    _print(table(rows, machine))
