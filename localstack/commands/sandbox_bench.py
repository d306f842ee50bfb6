"""``sandfleet sandbox-bench``: what sandboxes cost, beside what a plain use of the Docker Engine costs, on stacks of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

from sandfleet.localstack.measure import acquire_cost, exec_cost, idle_cost, kill_cost, many_runs, swe_rex
from sandfleet.localstack.measure.bed import bed
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import Steps, out

PARTS = ("exec", "acquire", "idle", "kill", "runs")
_COLD = "[templates.cold]\n"
_EXECUTORS = 2
# Limits are what a sandbox may take; here they must not bound how many there are.
_ROOM = {"SANDFLEET_HOST_MEMORY_BYTES": str(2**40), "SANDFLEET_HOST_PIDS": str(2**22)}


async def sandbox_bench(
    root: Path, project: Path, parts: Sequence[str], most: int, swe_rex_in: Path | None = None
) -> int:
    """Print the tables of these parts, with at most ``most`` sandboxes at once; 1 if a run failed. With an environment that
    has swe-rex, that is measured too."""
    if swe_rex_in is not None:
        swe_rex.check(swe_rex_in)
    if unknown := set(parts) - set(PARTS):
        raise LocalStackError(f"There is no part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}.")
    say = Steps()

    def up_to(*numbers: int) -> list[int]:
        return sorted({min(number, most) for number in numbers})

    failed = 0
    if "exec" in parts:
        async with bed(root, project, say, _COLD, **_ROOM) as made:
            await exec_cost.measure(made, up_to(1, 8, 32, 100))
    if "acquire" in parts:
        numbers = up_to(1, 10, 100)
        async with bed(root, project, say, acquire_cost.templates(numbers[-1]), **_ROOM) as made:
            await acquire_cost.measure(made, numbers, swe_rex_in)
    if "idle" in parts:
        async with bed(root, project, say, _COLD, **_ROOM) as made:
            await idle_cost.measure(made, up_to(100, 300))
    if "kill" in parts:
        async with bed(root, project, say, _COLD, **_ROOM) as made:
            await kill_cost.measure(made, root / "kill")
    if "runs" in parts:
        slots = {"SANDFLEET_SLOTS": str(-(-max(numbers := up_to(100, 300)) // _EXECUTORS))}
        env = {**os.environ, **_ROOM, **slots}
        stack = Stack(root, project, executors=_EXECUTORS, sandbox="docker", env=env, say=say)
        try:
            await stack.start()
            failed = await many_runs.measure(stack, numbers)
        finally:
            await stack.stop()
    load = os.getloadavg()[0]
    out.print(
        f"{os.cpu_count()} CPUs, load {load:.1f} at the end: on a machine that others use, compare ratios only."
    )
    return 1 if failed else 0
