"""What the processes of a host, its engine and its sandboxes use."""

import asyncio
import socket
import struct
from pathlib import Path

import psutil

from sandfleet.localstack.measure.bed import Bed


async def processes(bed: Bed) -> dict[str, tuple[int, float]]:
    """Memory (bytes of PSS, which counts what is shared once) and CPU seconds by kind of process, ended children included:
    ``agents`` and ``shims`` of the stack's containers, ``engine`` and ``host``."""
    return await asyncio.to_thread(_look, _engine_pid(bed), _host_pid(bed), set(await bed.running()))


def _look(engine_pid: int, host_pid: int, containers: set[str]) -> dict[str, tuple[int, float]]:
    children: dict[int, set[int]] = {}
    shims = set()
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], set()).add(process.pid)
        if not containers.isdisjoint(_arguments(process.pid)):
            shims.add(process.pid)
    kinds = {
        "agents": _below(shims, children),
        "shims": shims,
        "engine": {engine_pid} | _below({engine_pid}, children),
        "host": {host_pid},
    }
    return {name: (sum(map(_pss, pids)), sum(map(_cpu_s, pids))) for name, pids in kinds.items()}


def _below(pids: set[int], children: dict[int, set[int]]) -> set[int]:
    found: set[int] = set()
    while pids:
        pids = {child for pid in pids for child in children.get(pid, ())} - found
        found |= pids
    return found


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
        times = psutil.Process(pid).cpu_times()  # those of children that have ended are their parents'
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
