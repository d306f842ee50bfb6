"""What the processes of a host, its engine and its sandboxes use."""

import asyncio
import socket
import struct
from pathlib import Path

import psutil

from sandfleet.localstack.measure.bed import Bed


async def processes(bed: Bed) -> dict[str, tuple[int, float]]:
    """Memory (bytes of PSS, which counts what is shared once) and CPU seconds by kind of process,
    ended children included: ``agents``, ``shims``, ``engine`` and ``host``."""
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
