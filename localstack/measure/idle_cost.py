"""What idle sandboxes cost: memory of the machine, of their processes, of host and engine, and CPU time of these."""

import asyncio

import psutil

from sandfleet.localstack.measure.bed import Bed
from sandfleet.localstack.measure.processes import processes
from sandfleet.localstack.measure.tables import show

_MIB = 2**20
_SETTLE_S = 5.0
_COUNTED_S = 20.0
_AT_ONCE = 8
_AIM_MIB = 10.0


async def measure(bed: Bed, numbers: list[int]) -> None:
    """Print what so many sandboxes cost that have run a command and are idle since then."""
    rows = []
    for number in numbers:
        before, free = await processes(bed), psutil.virtual_memory().available
        slots = asyncio.Semaphore(_AT_ONCE)
        sandboxes = [await bed.sandbox("cold") for _ in range(number)]

        async def first(each: int) -> None:
            async with slots:  # noqa: B023 - they end in this turn of the loop
                await sandboxes[each].exec(["true"], timeout_s=300)  # noqa: B023

        await asyncio.gather(*(first(each) for each in range(number)))
        await asyncio.sleep(_SETTLE_S)
        after, free_after = await processes(bed), psutil.virtual_memory().available
        grown = {name: (after[name][0] - before[name][0]) / number / _MIB for name in after}
        total = sum(grown.values())
        cpu = await _cpu_percent(bed)
        rows.append(
            (
                number,
                *(f"{grown[name]:.1f}" for name in ("agents", "shims", "engine", "host")),
                f"{total:.1f}",
                f"{(free - free_after) / number / _MIB:.1f}",
                "kept" if total <= _AIM_MIB else "MISSED",
                f"{cpu['host']:.1f} %",
                f"{cpu['engine'] + cpu['shims']:.1f} %",
                f"{cpu['agents']:.1f} %",
            )
        )
        await bed.close_all(sandboxes)
    headings = (
        *("idle", "agents", "shims", "engine", "host", "MiB each", "of the machine", "aim: 10"),
        *("CPU: host", "engine", "agents"),
    )
    show("Idle sandboxes: MiB for each one more (PSS), and CPU of one core", headings, rows)


async def _cpu_percent(bed: Bed) -> dict[str, float]:
    before = await processes(bed)
    await asyncio.sleep(_COUNTED_S)
    after = await processes(bed)
    return {name: 100 * (after[name][1] - before[name][1]) / _COUNTED_S for name in after}
