"""What idle sandboxes cost: memory of the machine, of their processes, of host and engine, and CPU time of these."""

import asyncio
import socket
import struct
from pathlib import Path

import psutil

from sandfleet.localstack.measure.bed import Bed
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
        before, free = await _processes(bed), psutil.virtual_memory().available
        slots = asyncio.Semaphore(_AT_ONCE)
        sandboxes = [await bed.sandbox("cold") for _ in range(number)]

        async def first(each: int) -> None:
            async with slots:  # noqa: B023 - they end in this turn of the loop
                await sandboxes[each].exec(["true"], timeout_s=300)  # noqa: B023

        await asyncio.gather(*(first(each) for each in range(number)))
        await asyncio.sleep(_SETTLE_S)
        after, free_after = await _processes(bed), psutil.virtual_memory().available
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


async def _processes(bed: Bed) -> dict[str, tuple[int, float]]:
    """Memory (bytes of PSS, which counts what is shared once) and CPU seconds by kind of process."""
    return await asyncio.to_thread(_look, _engine_pid(bed), _host_pid(bed))


def _look(engine_pid: int, host_pid: int) -> dict[str, tuple[int, float]]:
    engine = psutil.Process(engine_pid)
    below = {engine_pid, *(child.pid for child in engine.children(recursive=True))}
    # Shims belong to init; the address that they were given is that of this engine's containerd.
    root = next((line for pid in below for line in _arguments(pid) if line.endswith("containerd.toml")), "")
    address = str(Path(root).with_name("containerd.sock"))
    shims = {p.pid for p in psutil.process_iter() if p.pid not in below and address in _arguments(p.pid)}
    agents = {child.pid for pid in shims for child in psutil.Process(pid).children(recursive=True)}
    kinds = {"agents": agents, "shims": shims, "engine": below, "host": {host_pid}}
    return {name: (sum(map(_pss, pids)), sum(map(_cpu_s, pids))) for name, pids in kinds.items()}


async def _cpu_percent(bed: Bed) -> dict[str, float]:
    before = await _processes(bed)
    await asyncio.sleep(_COUNTED_S)
    after = await _processes(bed)
    return {name: 100 * (after[name][1] - before[name][1]) / _COUNTED_S for name in after}


def _engine_pid(bed: Bed) -> int:
    """The process that listens at the engine's unix socket."""
    address = bed.stack.info.docker_host or ""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address.removeprefix("unix://"))
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _host_pid(bed: Bed) -> int:
    pid = bed.stack.supervisor.processes["host"].pid
    assert pid is not None
    return pid


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
