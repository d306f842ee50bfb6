"""Commands in sandboxes by the agent, and by ``docker exec`` through the engine's API, in turns in the same containers."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

from sandfleet.loadtest.percentile import percentile
from sandfleet.localstack.measure.bed import Bed
from sandfleet.localstack.measure.processes import processes
from sandfleet.localstack.measure.tables import show

_TURN_S = 4.0
_ROUNDS = 2


async def measure(bed: Bed, numbers: list[int]) -> None:
    """Print latency and throughput of ``true`` with so many callers at once, each in a container of its own."""
    rows: list[tuple[object, ...]] = []
    for number in numbers:
        sandboxes = [await bed.sandbox("cold") for _ in range(number)]
        await asyncio.gather(*(sandbox.exec("true", timeout_s=300) for sandbox in sandboxes))
        containers = await bed.running()
        ways: dict[str, list[Callable[[], Awaitable[object]]]] = {
            "agent": [partial(each.exec, ["true"]) for each in sandboxes],
            "docker exec": [partial(docker_exec, bed, each) for each in containers],
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        elapsed = dict.fromkeys(ways, 0.0)
        cpu_s = dict.fromkeys(ways, 0.0)
        for _ in range(_ROUNDS):
            for name, callers in ways.items():
                before = await _cpu_s(bed)
                took, latencies = await _turn(callers)
                cpu_s[name] += await _cpu_s(bed) - before
                elapsed[name] += took
                spent[name] += latencies
        p50 = {name: percentile(each, 50) for name, each in spent.items()}
        rate = {name: len(each) / elapsed[name] for name, each in spent.items()}
        cpu = {name: 1000 * cpu_s[name] / len(each) for name, each in spent.items()}
        for name in ways:
            shown = (
                f"{p50[name] * 1000:.1f}",
                f"{percentile(spent[name], 95) * 1000:.1f}",
                f"{rate[name]:.0f}",
            )
            rows.append((number, name, *shown, f"{cpu[name]:.1f}", ""))
        latency, throughput = p50["docker exec"] / p50["agent"], rate["agent"] / rate["docker exec"]
        ratios = (f"{latency:.0f} ×", "", f"{throughput:.0f} ×", f"{cpu['docker exec'] / cpu['agent']:.0f} ×")
        rows.append(("", "ratio", *ratios, _kept(latency, throughput)))
        await bed.close_all(sandboxes)
    headings = ("at once", "way", "p50 ms", "p95 ms", "commands/s", "CPU ms each", "aim: 40 × and 25 ×")
    show("Commands: agent and docker exec in the same containers", headings, rows)


def _kept(latency: float, throughput: float) -> str:
    return "kept" if latency >= 40 and throughput >= 25 else "MISSED"


async def _cpu_s(bed: Bed) -> float:
    """Of host, engine, sandboxes and this client, which needs a share of it."""
    own = os.times()
    used = await processes(bed)
    return own.user + own.system + sum(seconds for _, seconds in used.values())


async def _turn(callers: list[Callable[[], Awaitable[object]]]) -> tuple[float, list[float]]:
    """Let each caller call again and again for some seconds: how long that was, and the latencies in seconds."""
    latencies: list[float] = []
    start = time.monotonic()

    async def repeat(call: Callable[[], Awaitable[object]]) -> None:
        while (begun := time.monotonic()) < start + _TURN_S:
            await call()
            latencies.append(time.monotonic() - begun)

    await asyncio.gather(*(repeat(call) for call in callers))
    return time.monotonic() - start, latencies


async def docker_exec(bed: Bed, container: str) -> None:
    """``docker exec CONTAINER true``: what its client does, its end and exit code included."""
    body = {"Cmd": ["true"], "AttachStdout": True, "AttachStderr": True}
    made = await bed.engine.call("POST", f"/containers/{container}/exec", body=body)
    await bed.engine.call("POST", f"/exec/{made['Id']}/start", body={"Detach": False, "Tty": False})
    found = await bed.engine.call("GET", f"/exec/{made['Id']}/json")
    if found["ExitCode"] != 0:
        raise RuntimeError(f"docker exec ended with {found['ExitCode']}")
