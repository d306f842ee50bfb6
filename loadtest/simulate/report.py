"""Tables and a plot of what policies made of traces."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sandfleet.loadtest.percentile import percentile
from sandfleet.loadtest.simulate.world import Machine, Outcome


class Row(NamedTuple):
    """One policy on one trace."""

    trace: str
    policy: str
    outcome: Outcome


_HEAD = ("trace", "policy", "wait p50", "p95", "p99", "machine hours", "cost", "peak", "changes")


def table(rows: Sequence[Row], machine: Machine) -> str:
    """A table in Markdown; waits in seconds."""
    lines = [f"| {' | '.join(_HEAD)} |", "| --- | --- |" + " ---: |" * (len(_HEAD) - 2)]
    shown = ""
    for trace, policy, outcome in rows:
        waits = (f"{percentile(outcome.waits_s, percent):.1f}" for percent in (50, 95, 99))
        cells = [
            "" if trace == shown else trace,
            policy,
            *waits,
            f"{outcome.hours:.1f}",
            f"{outcome.hours * machine.price_per_hour:.2f}",
            str(outcome.peak),
            str(outcome.changes),
        ]
        shown = trace
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: Sequence[Row], machine: Machine, file: Path, title: str) -> None:
    """Write an SVG: for each trace, executors over time and wait against cost, a colour per policy.

    Raises ImportError without matplotlib, which is for development only.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "sandfleet"  # the same figures make the same file
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row.trace for row in rows))
    figure, axes = pyplot.subplots(len(names), 2, figsize=(11, 2.3 * len(names)), squeeze=False)
    colours = {policy: f"C{n}" for n, policy in enumerate(dict.fromkeys(row.policy for row in rows))}
    for name, (over_time, compared) in zip(names, axes, strict=True):
        for row in rows:
            if row.trace != name:
                continue
            colour = colours[row.policy]
            minutes = [at_s / 60 for at_s, _, _ in row.outcome.timeline]
            over_time.step(
                minutes,
                [count for _, count, _ in row.outcome.timeline],
                color=colour,
                linewidth=1,
                where="post",
            )
            for percent, marker in ((50, "o"), (95, "^")):
                compared.plot(
                    row.outcome.hours * machine.price_per_hour,
                    percentile(row.outcome.waits_s, percent),
                    marker,
                    color=colour,
                )
        over_time.set_title(name, fontsize=9, loc="left")
        over_time.set_ylabel("machines", fontsize=8)
        compared.set_ylabel("wait, s", fontsize=8)
        compared.set_yscale("symlog", linthresh=1)
        compared.set_ylim(bottom=-0.2)
        compared.set_xlim(left=0)
        for ax in (over_time, compared):
            ax.tick_params(labelsize=7)
            ax.grid(alpha=0.3)
    axes[-1][0].set_xlabel("minutes", fontsize=8)
    axes[-1][1].set_xlabel("cost; ● p50, ▲ p95", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.legend(
        handles=[Line2D([], [], color=colour, label=policy) for policy, colour in colours.items()],
        loc="lower center",
        ncols=len(colours),
        fontsize=8,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.98))
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
