"""``python -m tests.chaos --seed 1 --runs 1000``: a session of chaos on a stack of its own. ``make chaos`` calls it."""

import os
import random
import shutil
from pathlib import Path
from typing import Annotated

import typer

from sandfleet.localstack import terminal
from sandfleet.localstack.stack import Stack
from sandfleet.shared.fault_points import VARIABLE
from tests.chaos.schedule import APIS, EXECUTORS
from tests.chaos.session import SETTINGS, chaos
from tests.projects.chaos.ladder import EFFECTS

PROJECT = Path(__file__).parent.parent / "projects" / "chaos" / "langgraph.json"


async def _session(
    seed: int,
    runs: int,
    faults_s: float | None,
    asked_s: float | None,
    harm: int,
    folder: Path,
    sandbox: str,
    quiet: bool,
) -> int:
    """What a session leaves in its folder is kept when it found something: the database and the logs tell more."""
    root = folder / f"seed-{seed}-{os.getpid()}"

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    print(f"seed {seed}", flush=True)
    effects = root / "effects.txt"
    effects.parent.mkdir(parents=True, exist_ok=True)
    effects.write_text("")
    points = root / "points"
    points.mkdir()
    stack = Stack(
        root,
        PROJECT,
        executors=len(EXECUTORS),
        apis=len(APIS),
        sandbox=sandbox,
        env={**SETTINGS, EFFECTS: str(effects.resolve()), VARIABLE: str(points.resolve())},
        say=say,
        engine_dir=Path(".sandfleet/docker"),
    )
    try:
        await stack.start()
        report = await chaos(
            stack, seed, runs, effects, points, faults_s=faults_s, asked_s=asked_s, harm=harm, say=say
        )
    finally:
        removed = await stack.stop()
    if removed:
        report.problems.append(f"had to be removed by force: {removed}")
    print("\n".join(report.lines()), flush=True)
    if report.problems:
        print(f"database and logs are in {root}", flush=True)
        return 1
    shutil.rmtree(root)
    return 0


def main(
    seed: Annotated[int | None, typer.Option(help="Default: a random one.")] = None,
    runs: Annotated[int, typer.Option(help="Runs to be accepted, at least.")] = 1000,
    faults_s: Annotated[float | None, typer.Option(help="How long faults come; default: to the end.")] = None,
    asked_s: Annotated[float | None, typer.Option(help="Ask for no more runs after so long.")] = None,
    harm: Annotated[int, typer.Option(help="Hit processes so many times as often.")] = 1,
    folder: Annotated[Path, typer.Option(help="Folder for stacks.")] = Path(".sandfleet/chaos"),
    sandbox: Annotated[str, typer.Option(help="auto, docker or bwrap.")] = "auto",
    quiet: Annotated[bool, typer.Option(help="Do not print each fault.")] = False,
) -> None:
    """A session of chaos on a stack of its own. Exits with 1 if anything was wrong."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    chosen = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    terminal.run(_session(chosen, runs, faults_s, asked_s, harm, folder, sandbox, quiet))


if __name__ == "__main__":
    typer.run(main)
