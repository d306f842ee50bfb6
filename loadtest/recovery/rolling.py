"""A rolling restart as clients see it: what is handed over goes on soon, and what ends within the grace period is not held up."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import orjson

from sandfleet.loadtest.bench.http import Connection, ConnectionLost
from sandfleet.loadtest.percentile import percentile
from sandfleet.loadtest.recovery.measures import takeover
from sandfleet.loadtest.recovery.streams import Api, Events, LongRun

_RUN_TIMEOUT_S = 120.0


@dataclass
class Load:
    """What a stretch of steady load gave: seconds per run, from its submission to ``end``, and what went wrong."""

    durations_s: list[float] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def hand_over(
    runs: Sequence[LongRun], terminate: Callable[[], Awaitable[object]], grace_s: float
) -> list[float]:
    """``terminate`` sends SIGTERM to the executor that works on all these runs, which lets them go on for ``grace_s``: from
    the end of that until each successor's first event."""
    waited = await takeover(runs, terminate)
    return [value - grace_s for value in waited]


async def load(api: Api, clients: int, model_delay_s: float, during: Callable[[], Awaitable[object]]) -> Load:
    """Keep ``clients`` runs under way, each with one model call of ``model_delay_s``, for as long as ``during`` takes."""
    given = Load()
    over = asyncio.Event()

    async def client() -> None:
        connection = await api.open()
        while not over.is_set():
            if connection.closed:
                connection = await api.open()
            await _run(connection, model_delay_s, given)
        connection.close()

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        await during()
    finally:
        over.set()
        await asyncio.gather(*tasks)
    return given


async def _run(connection: Connection, model_delay_s: float, given: Load) -> None:
    script = orjson.dumps({"text": "done", "delay_ms": model_delay_s * 1000}).decode()
    message = {"role": "user", "content": f"go on #id:{uuid.uuid4().hex} #script:{script}"}
    body = {"assistant_id": "hello", "stream_mode": ["updates"], "input": {"messages": [message]}}
    events = Events()
    sent_at_s = time.monotonic()
    try:
        async with asyncio.timeout(_RUN_TIMEOUT_S):
            await connection.ask(events, "POST", "/runs/stream", orjson.dumps(body))
    except (ConnectionLost, TimeoutError) as error:
        given.failures.append(type(error).__name__)
        connection.close()
        return
    if not events.ended_at_s or events.failed:
        given.failures.append(f"status {events.status}")
        return
    given.durations_s.append(events.ended_at_s - sent_at_s)
    given.attempts.append(max(events.begun_at_s))


def extra_delay(calm: Load, rolling: Load) -> list[float]:
    """By how much each run of the second stretch took longer than the median of the first, in seconds, at least 0."""
    usual_s = percentile(calm.durations_s, 50)
    return [max(0.0, taken_s - usual_s) for taken_s in rolling.durations_s]
