"""Runs at once, each with a sandbox of its own and a command of some seconds: how soon, how much memory, and what is left."""

import asyncio
import time
from contextlib import suppress

import psutil

from sandfleet.loadtest.percentile import percentile
from sandfleet.loadtest.recovery.streams import Api
from sandfleet.loadtest.sandbox_runs import run_all
from sandfleet.localstack import docker_api
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.measure.tables import show
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.terminal import out

_COMMAND_S = 5.0
_LOOK_S = 0.2
_GIB = 2**30


async def measure(stack: Stack, numbers: list[int]) -> int:
    """Print a row for each number of runs; how many runs failed, and things that were left."""
    rows = []
    wrong = 0
    api = Api(stack.info.api_url, {"x-api-key": stack.info.api_key})
    for number in numbers:
        free = psutil.virtual_memory().available
        least = [free]
        watching = asyncio.create_task(_watch(least))
        begun = time.monotonic()
        runs = await run_all(api, number, _COMMAND_S)
        took = time.monotonic() - begun
        gone_s = await _gone(stack)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        failures = [run.failure for run in runs if run.failure]
        wrong += len(failures)
        for failure in sorted(set(failures))[:5]:
            out.print(f"failed: {failure}", markup=False)
        good = [run for run in runs if not run.failure]
        if good:
            first, end = [run.first_output_s for run in good], [run.end_s for run in good]
            times = [f"{percentile(each, percent):.1f}" for each in (first, end) for percent in (50, 95)]
        else:
            times = ["–"] * 4
        rows.append(
            (number, len(failures), *times, f"{took:.1f}", f"{(free - least[0]) / _GIB:.2f}", f"{gone_s:.1f}")
        )
    headings = (
        *("runs", "failed", "first output p50 s", "p95 s", "end p50 s", "p95 s", "all s"),
        *("peak of memory GiB", "containers gone after s"),
    )
    show(f"Runs at once, each with its own sandbox and a command of {_COMMAND_S:.0f} s", headings, rows)
    return wrong


async def _watch(least: list[int]) -> None:
    """For ever: note the least memory (bytes) that was available."""
    while True:
        await asyncio.sleep(_LOOK_S)
        least[0] = min(least[0], psutil.virtual_memory().available)


async def _gone(stack: Stack) -> float:
    """Seconds until the stack has no container or network any more. Raises TimeoutError after five minutes."""
    assert stack.info.docker_host is not None
    begun = time.monotonic()
    label = f"{LABEL}={stack.info.instance}"
    docker_host = stack.info.docker_host
    async with asyncio.timeout(300):
        while await asyncio.to_thread(docker_api.labelled, docker_host, label):  # noqa: ASYNC110 - nor the engine
            await asyncio.sleep(_LOOK_S)
    return time.monotonic() - begun
