"""The measures: what a client waits for after an executor's death, and after a cancel. Latencies in seconds."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from sandfleet.loadtest.recovery.streams import Api, LongRun

_DEADLINE_S = 120.0
_LOOK_EVERY_S = 0.005


async def begin_all(api: Api, count: int) -> list[LongRun]:
    """So many long runs, all of them begun, a few at a time."""
    limit = asyncio.Semaphore(10)

    async def begin() -> LongRun:
        async with limit:
            return await LongRun.begin(api)

    return await asyncio.gather(*(begin() for _ in range(count)))


async def end_all(runs: Sequence[LongRun]) -> None:
    """Cancel them and wait for their ends."""
    async with asyncio.timeout(_DEADLINE_S):
        await asyncio.gather(*(run.cancel() for run in runs))
        await asyncio.gather(*(run.events.ended() for run in runs))
    for run in runs:
        await run.close()


async def takeover(runs: Sequence[LongRun], kill: Callable[[], Awaitable[object]]) -> list[float]:
    """``kill`` ends the executor that works on all these runs: from then on until each successor's first event."""
    before = [max(run.events.begun_at_s) for run in runs]
    killed_at_s = time.monotonic()
    await kill()
    async with asyncio.timeout(_DEADLINE_S):
        begun = await asyncio.gather(
            *(run.events.begun(attempt + 1) for run, attempt in zip(runs, before, strict=True))
        )
    return [at_s - killed_at_s for at_s in begun]


async def cancels(api: Api, count: int) -> list[float]:
    """From a cancel's request until the stream's ``end``, which follows the commit of ``interrupted``; one at a time."""
    waited = []
    for _ in range(count):
        run = await LongRun.begin(api)
        sent_at_s = await run.cancel()
        async with asyncio.timeout(_DEADLINE_S):
            waited.append(await run.events.ended() - sent_at_s)
        await run.close()
    return waited


async def command_cancels(
    api: Api, count: int, find: Callable[[str], Awaitable[Callable[[], bool]]]
) -> tuple[list[float], list[float]]:
    """Cancel runs whose sandbox works on a command: until ``end``, and until its whole process tree is dead.

    ``find`` waits until processes with this text in their command line run on the machine, and returns what tells whether
    any of them still does.
    """
    ended, dead = [], []
    for number in range(count):
        seconds = f"{700_000 + number}.{time.monotonic_ns() % 1_000_000:06}"
        # A tree: a shell, and two children of different kinds.
        run = await LongRun.begin(api, command=f"sleep {seconds} & (sleep {seconds}; true) & wait")
        async with asyncio.timeout(_DEADLINE_S):
            alive = await find(seconds)
            sent_at_s = await run.cancel()
            dead.append(await _death(alive) - sent_at_s)
            ended.append(await run.events.ended() - sent_at_s)
        await run.close()
    return ended, dead


async def _death(alive: Callable[[], bool]) -> float:
    while True:
        if not alive():
            return time.monotonic()
        await asyncio.sleep(_LOOK_EVERY_S)
