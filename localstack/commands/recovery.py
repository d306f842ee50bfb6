"""``sandfleet recovery``: how long clients wait after an executor's death or restart and after a cancel, and what PostgreSQL bears.

The clients are ``loadtest/recovery``, which knows nothing but HTTP; here are the stacks, the kills and the database.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich import box
from rich.table import Table

from sandfleet.loadtest.percentile import percentile
from sandfleet.loadtest.recovery.measures import (
    begin_all,
    cancels,
    command_cancels,
    end_all,
    takeover,
)
from sandfleet.loadtest.recovery.rolling import extra_delay, hand_over, load
from sandfleet.loadtest.recovery.streams import Api
from sandfleet.localstack.servers import database_url
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.statements import statements_per_second
from sandfleet.localstack.terminal import Steps, out

_LONG_RUNS = 100
_CANCELS = 40
_COMMAND_CANCELS = 10
_COUNTED_S = 15.0
_OTHERS = {"sandfleet-api", "sandfleet-host", "", "[unknown]"}  # clients of PostgreSQL that are no executor's
_SLOTS = "128"
_LEASE_S = 16.0  # the default one, and a second
_SETTLE_S = 3.0
_CLIENTS = 40
_MODEL_DELAY_S = 2.0
_GRACE_S = 3.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Measured:
    """A row of the table: what, what came of it, and what it should be at most (None: nothing was said)."""

    what: str
    found: str
    aim: str = ""
    kept: bool | None = None


def _seconds(what: str, latencies: Sequence[float], aim_s: float | None = None) -> Measured:
    p50, p95 = percentile(latencies, 50), percentile(latencies, 95)
    found = f"{_ms(p50)} / {_ms(p95)}  ({len(latencies)} times)"
    if aim_s is None:
        return Measured(what, found)
    return Measured(what, found, f"p95 ≤ {_ms(aim_s)}", p95 <= aim_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


async def recovery(root: Path, project: Path) -> int:
    """Measure and print the table; 1 if an aim was missed."""
    say = Steps()
    rows = await _with_default_lease(root, project, say)
    rows += await _with_short_lease(root, project, say)
    rows += await _with_restarts(root, project, say)
    table = Table(title="Recovery and cancel, p50 / p95", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("from … to …", "measured", "aim", ""):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.what, row.found, row.aim, {True: "kept", False: "MISSED", None: ""}[row.kept])
    out.print(table)
    return 1 if any(row.kept is False for row in rows) else 0


async def _with_default_lease(root: Path, project: Path, say: Callable[[str], None]) -> list[Measured]:
    stack = Stack(root, project, executors=2, env={"SANDFLEET_SLOTS": _SLOTS}, say=say)
    try:
        await stack.start()
        api = _api(stack)
        await stack.supervisor.stop("executor-2")
        say("counting statements")
        # Before that the sweep looks at no lease: the database has just been started.
        await asyncio.sleep(_LEASE_S)
        idle = await _statements(stack)
        runs = await begin_all(api, _LONG_RUNS)
        await asyncio.sleep(_SETTLE_S)
        busy = await _statements(stack)
        rows = [
            Measured("statements/s of an idle executor", _counts(idle)),
            Measured(
                f"statements/s with {_LONG_RUNS} long runs",
                _counts(busy),
                "idle ± 20 %",
                abs(sum(busy.values()) / sum(idle.values()) - 1) <= 0.2,
            ),
        ]
        await stack.restart("executor-2")
        say(f"killing the executor of {_LONG_RUNS} runs")
        taken = await takeover(runs, lambda: stack.kill("executor-1"))
        rows.append(_seconds("kill -9 → successor's first event, lease 15 s", taken, 16.0))
        await end_all(runs)
        say("cancelling")
        rows.append(_seconds("cancel → `interrupted` seen on the stream", await cancels(api, _CANCELS), 0.3))
        ended, dead = await command_cancels(api, _COMMAND_CANCELS, _find)
        rows.append(_seconds("cancel of a sandbox command → `interrupted`", ended))
        rows.append(_seconds("cancel of a sandbox command → process tree dead", dead))
        return rows
    finally:
        await stack.stop()


async def _with_short_lease(root: Path, project: Path, say: Callable[[str], None]) -> list[Measured]:
    env = {"SANDFLEET_SLOTS": _SLOTS, "SANDFLEET_LEASE_S": "5", "SANDFLEET_RENEW_EVERY_S": "1.5"}
    stack = Stack(root, project, executors=2, env=env, say=say)
    try:
        await stack.start()
        await stack.supervisor.stop("executor-2")
        runs = await begin_all(_api(stack), _LONG_RUNS)
        victim, successor = "executor-1", "executor-2"
        found: list[float] = []
        for _ in range(3):
            await stack.restart(successor)
            await asyncio.sleep(_SETTLE_S)
            say(f"killing the executor of {_LONG_RUNS} runs")
            taken = await takeover(runs, lambda name=victim: stack.kill(name))  # type: ignore[misc]
            found += taken
            victim, successor = successor, victim
        await end_all(runs)
        return [_seconds("kill -9 → successor's first event, lease 5 s", found, 6.0)]
    finally:
        await stack.stop()


async def _with_restarts(root: Path, project: Path, say: Callable[[str], None]) -> list[Measured]:
    env = {"SANDFLEET_SLOTS": _SLOTS, "SANDFLEET_DRAIN_GRACE_S": str(_GRACE_S)}
    stack = Stack(root, project, executors=2, env=env, say=say)

    async def restart_all() -> None:
        for name in ("executor-1", "executor-2"):
            say(f"restarting {name}")
            await stack.restart(name)
            await asyncio.sleep(_SETTLE_S)

    try:
        await stack.start()
        api = _api(stack)
        await stack.supervisor.stop("executor-2")
        runs = await begin_all(api, _LONG_RUNS)
        await stack.restart("executor-2")
        await asyncio.sleep(_SETTLE_S)
        say(f"handing {_LONG_RUNS} runs over")
        paused = await hand_over(runs, lambda: stack.kill("executor-1", signal.SIGTERM), _GRACE_S)
        await end_all(runs)
        await stack.restart("executor-1")
        say(f"restarting all executors under {_CLIENTS} clients")
        calm = await load(api, _CLIENTS, _MODEL_DELAY_S, lambda: asyncio.sleep(3 * _MODEL_DELAY_S))
        rolling = await load(api, _CLIENTS, _MODEL_DELAY_S, restart_all)
        lost = len(calm.failures) + len(rolling.failures)
        return [
            _seconds(f"hand-over of {_LONG_RUNS} runs: end of grace → successor's first event", paused, 1.5),
            _seconds("rolling restart: extra delay per run", extra_delay(calm, rolling), 1.5),
            Measured("rolling restart: runs lost", f"{lost} of {len(rolling.durations_s)}", "0", lost == 0),
            Measured("rolling restart: runs handed over", str(sum(n > 1 for n in rolling.attempts))),
        ]
    finally:
        await stack.stop()


def _api(stack: Stack) -> Api:
    return Api(stack.info.api_url, {"x-api-key": stack.info.api_key})


async def _statements(stack: Stack) -> dict[str, float]:
    """Those of the executors alone, per second, by the connection that sends them."""
    admin_url = database_url(stack.info.database_url, "postgres")
    log = stack.supervisor.logs / "postgres.log"
    found = await statements_per_second(admin_url, log, _COUNTED_S)
    return {name: rate for name, rate in found.items() if name not in _OTHERS}


def _counts(rates: dict[str, float]) -> str:
    parts = ", ".join(f"{name.removeprefix('sandfleet-')} {rate:.1f}" for name, rate in sorted(rates.items()))
    return f"{sum(rates.values()):.1f}  ({parts})"


async def _find(text: str) -> Callable[[], bool]:
    """Wait for both sleeps of the command; returns whether any of them is alive."""
    while True:
        found = await asyncio.to_thread(_sleeps, text)
        if len(found) == 2:
            return lambda: any(map(_is_alive, found))
        await asyncio.sleep(_LOOK_EVERY_S)


def _sleeps(text: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", text]:
                found.append(process)
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
