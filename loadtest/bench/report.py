"""The printed tables: one of rates and latencies, one of CPU time by process. Plain text without a terminal."""

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sandfleet.loadtest.bench.figures import LATENCIES, Figures

_VERSIONS = (
    "langgraph",
    "langchain",
    "langchain-openai",
    "arq",
    "langgraph-checkpoint-postgres",
    "fastapi",
    "redis",
)
_PLAIN_WIDTH = 160


def machine() -> dict[str, Any]:
    """The machine and the versions that the figures belong to."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory_kib = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 1024**2, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def console() -> Console:
    """Rich on a terminal; elsewhere plain and wide enough for the tables."""
    found = Console()
    return found if found.is_terminal else Console(width=_PLAIN_WIDTH, no_color=True, highlight=False)


def print_report(
    out: Console, results: Sequence[Figures], about: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Print both tables, the ratios, the failures, the machine and the settings."""
    out.print(_latency_table(results, plain=not out.is_terminal))
    out.print(_cpu_table(results, plain=not out.is_terminal))
    for line in _ratios(results):
        out.print(line)
    for figures in results:
        for message in figures.failure_messages:
            out.print(f"failure, {figures.target} at {figures.concurrency}: {message}", markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    out.print(
        f"Machine: {about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, load {about['load_before']} before."
    )
    out.print(f"Versions: {versions}.")
    out.print(
        "Settings: " + ", ".join(f"{name} {value}" for name, value in settings.items()) + ".", markup=False
    )


def _table(title: str, plain: bool) -> Table:
    return Table(title=title, title_justify="left", box=box.ASCII2 if plain else box.SIMPLE_HEAD)


def _latency_table(results: Sequence[Figures], plain: bool) -> Table:
    table = _table("Closed loop, “say hi”. Latencies: p50 / p95 in ms.", plain)
    table.add_column("clients", justify="right")
    table.add_column("system")
    for heading in ("runs/s", "(of rounds)", *LATENCIES, "CPU ms/run", "runs", "failed"):
        table.add_column(heading, justify="right")
    for figures in results:
        table.add_row(
            str(figures.concurrency),
            figures.target,
            f"{figures.runs_per_s:.1f}",
            f"{figures.slowest_round_per_s:.0f}–{figures.fastest_round_per_s:.0f}",
            *(f"{p50:.1f} / {p95:.1f}" for p50, p95 in figures.latencies_ms.values()),
            f"{_system_cpu(figures):.1f}",
            str(figures.runs),
            str(figures.failures),
            end_section=figures is results[-1]
            or results[results.index(figures) + 1].concurrency != figures.concurrency,
        )
    return table


def _system_cpu(figures: Figures) -> float:
    """CPU time of the system itself: without the provider and the bench's own client."""
    return sum(ms for name, ms in figures.cpu_ms_per_run.items() if name not in ("provider", "bench client"))


def _cpu_table(results: Sequence[Figures], plain: bool) -> Table:
    table = _table("CPU ms per run by process, children included.", plain)
    table.add_column("clients", justify="right")
    table.add_column("system")
    names = list(dict.fromkeys(name for figures in results for name in figures.cpu_ms_per_run))
    for name in names:
        table.add_column(name, justify="right")
    for figures in results:
        cells = (f"{figures.cpu_ms_per_run[n]:.2f}" if n in figures.cpu_ms_per_run else "" for n in names)
        table.add_row(str(figures.concurrency), figures.target, *cells)
    return table


def _ratios(results: Sequence[Figures]) -> list[str]:
    by_key = {(figures.target, figures.concurrency): figures for figures in results}
    lines = []
    for (target, concurrency), ours in by_key.items():
        base = by_key.get(("baseline", concurrency))
        if target != "baseline" and base is not None and base.runs_per_s:
            lines.append(
                f"{concurrency} clients: {ours.runs_per_s / base.runs_per_s:.2f} times the baseline's runs/s"
            )
    return lines
