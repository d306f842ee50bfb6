"""The closed loop: so many clients, each of which starts its next run when the last one has ended."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from sandfleet.loadtest.bench.cpu import cpu_ms
from sandfleet.loadtest.bench.http import Connection, ConnectionLost, Exchange
from sandfleet.loadtest.bench.stream import RunStream

_RUN_TIMEOUT_S = 120.0
# What is left to do after a run's end (acknowledgements, cleaning) still belongs to its CPU time.
_SETTLE_S = 0.25


@dataclass(frozen=True)
class Target:
    """A system under test: its name, URL, headers, and the processes whose CPU time belongs to it."""

    name: str
    base_url: str
    headers: Mapping[str, str]
    pids: Mapping[str, int]
    assistant: str = "hello"


@dataclass
class Sample:
    """One run; times in seconds of CLOCK_MONOTONIC. ``failure`` says what went wrong, if anything."""

    id: str
    submitted_at_s: float
    accepted_at_s: float = 0.0
    model_at_s: float = 0.0
    first_token_at_s: float = 0.0
    terminal_at_s: float = 0.0
    failure: str | None = None


@dataclass
class Round:
    """What one stretch of the loop gave: its samples, its duration, and the CPU time of each process in it."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_ms: dict[str, float] = field(default_factory=dict)


class Loop:
    """The load that every target gets: the prompt, and the model that it reaches."""

    def __init__(self, provider_url: str, model_delay_ms: float) -> None:
        """``provider_url`` is the scripted provider's, with or without ``/v1``."""
        self._provider_url = provider_url.rstrip("/").removesuffix("/v1")
        self._directive = ""
        self._expected = "Hi! How can I help you today?"
        if model_delay_ms > 0:
            script = {"text": self._expected, "delay_ms": model_delay_ms}
            self._directive = f" #script:{orjson.dumps(script).decode()}"

    async def round(self, target: Target, concurrency: int, runs: int) -> Round:
        """Do ``runs`` runs with ``concurrency`` clients, each with a connection of its own."""
        provider = await Connection.open(self._provider_url, {})
        await provider.ask(Exchange(), "POST", "/_reset")
        connections = [
            await Connection.open(target.base_url, dict(target.headers))
            for _ in range(min(concurrency, runs))
        ]
        left = iter(range(runs))
        result = Round()

        async def client(connection: Connection) -> None:
            for _ in left:
                if connection.closed:
                    connection = await Connection.open(target.base_url, dict(target.headers))
                result.samples.append(await self._run(target, connection))
            connection.close()

        cpu_before, own_before = cpu_ms(target.pids), time.process_time()
        begun = time.monotonic()
        await asyncio.gather(*map(client, connections))
        result.wall_s = time.monotonic() - begun
        own_ms = (time.process_time() - own_before) * 1000
        await asyncio.sleep(_SETTLE_S)
        cpu_after = cpu_ms(target.pids)
        result.cpu_ms = {name: cpu_after[name] - cpu_before[name] for name in cpu_after} | {
            "bench client": own_ms
        }
        await self._add_arrivals(provider, result.samples)
        return result

    async def _run(self, target: Target, connection: Connection) -> Sample:
        sample = Sample(id=uuid.uuid4().hex, submitted_at_s=time.monotonic())
        try:
            async with asyncio.timeout(_RUN_TIMEOUT_S):
                sample.failure = await self._attempt(target, connection, sample)
        except TimeoutError:
            connection.close()
            sample.failure = f"no end within {_RUN_TIMEOUT_S:g} s"
        except (ConnectionLost, OSError) as error:
            sample.failure = f"connection lost {error}".strip()
        return sample

    async def _attempt(self, target: Target, connection: Connection, sample: Sample) -> str | None:
        """Fill in the sample; return the failure, if any."""
        thread = await connection.ask(Exchange(), "POST", "/threads", b"{}")
        if not 200 <= thread.status < 300:
            return f"POST /threads answered {thread.status}: {thread.body[:200]!r}"
        path = f"/threads/{orjson.loads(thread.body)['thread_id']}/runs/stream"
        prompt = f"say hi #id:{sample.id}{self._directive}"
        body = orjson.dumps(
            {
                "assistant_id": target.assistant,
                "input": {"messages": [{"role": "user", "content": prompt}]},
                "stream_mode": ["messages-tuple"],
            }
        )
        sample.submitted_at_s = time.monotonic()
        run = await connection.ask(RunStream(), "POST", path, body)
        if run.status != 200:
            return f"POST {path} answered {run.status}: {run.body[:200]!r}"
        sample.accepted_at_s = run.head_at_s
        sample.first_token_at_s = run.first_token_at_s
        sample.terminal_at_s = run.terminal_at_s
        if run.error is not None:
            return f"error event: {run.error}"
        if run.text != self._expected:
            return f"the streamed text is {run.text!r}"
        return None

    async def _add_arrivals(self, provider: Connection, samples: list[Sample]) -> None:
        """Take from the provider's record when each run's model request arrived."""
        answer = await provider.ask(Exchange(), "GET", "/_requests")
        provider.close()
        arrived: dict[str, float] = {}
        for arrival in orjson.loads(answer.body)["requests"]:
            arrived.setdefault(arrival["id"], arrival["monotonic_s"])
        for sample in samples:
            sample.model_at_s = arrived.get(sample.id, 0.0)
            if sample.failure is None and not sample.model_at_s:
                sample.failure = "no request reached the model"
