"""Clients that start long runs and watch their streams: when each event came, in seconds of `time.monotonic`."""

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import orjson

from sandfleet.loadtest.bench.http import Connection, ConnectionLost, Exchange
from sandfleet.loadtest.bench.stream import EventStream

_LONG_S = 900.0
_BEGIN_WITHIN_S = 60.0


@dataclass(frozen=True)
class Api:
    """Where runs are submitted: the API's URL, and headers with a key."""

    url: str
    headers: Mapping[str, str]

    async def open(self) -> Connection:
        """A connection of its own."""
        return await Connection.open(self.url, dict(self.headers))


class Events(EventStream):
    """The answer to a run's stream. ``begun_at_s`` has the arrival of each attempt's first event, by attempt; ``failed``
    says whether the run ended with an error."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at_s: dict[int, float] = {}
        self.ended_at_s = 0.0
        self.failed = False
        self.path = ""
        self._arrived = asyncio.Event()
        self.finished.add_done_callback(lambda _: self._arrived.set())

    async def begun(self, attempt: int) -> float:
        """When the first event of this attempt, or of a later one, came; waits for it."""
        while not any(number >= attempt for number in self.begun_at_s):
            await self._wait()
        return min(at for number, at in self.begun_at_s.items() if number >= attempt)

    async def ended(self) -> float:
        """When ``end`` came; waits for it."""
        while not self.ended_at_s:
            await self._wait()
        return self.ended_at_s

    async def _wait(self) -> None:
        if self.finished.done():
            raise ConnectionLost(f"the stream of {self.path} closed: {self.status} {self.body[:200]!r}")
        self._arrived.clear()
        await self._arrived.wait()

    def dispatch(self, event: bytes, data: bytes, at_s: float) -> None:
        if event == b"metadata":
            metadata = orjson.loads(data)
            self.path = self.path or metadata["run_id"]
            self.begun_at_s.setdefault(metadata["attempt"], at_s)
        elif event == b"error":
            self.failed = True
        elif event == b"end":
            self.ended_at_s = at_s
        self._arrived.set()


class LongRun:
    """A run that goes on until it is cancelled: its model says nothing for a quarter of an hour. Its stream is open."""

    def __init__(self, api: Api, thread: str, connection: Connection, events: Events, script: str) -> None:
        self.events = events
        self._api = api
        self._thread = thread
        self._connection = connection
        body = {"assistant_id": "hello", "stream_mode": ["updates"], "input": _prompt(script)}
        if script:
            body["assistant_id"] = "coder"
        self._stream = asyncio.ensure_future(
            connection.ask(events, "POST", f"/threads/{thread}/runs/stream", orjson.dumps(body))
        )

    @classmethod
    async def begin(cls, api: Api, *, command: str = "") -> "LongRun":
        """Start one; returns when an executor has begun it. Raises TimeoutError when none does within a minute. With ``command`` it runs that in its sandbox instead of
        asking a silent model."""
        asking = await api.open()
        try:
            thread = await asking.ask(Exchange(), "POST", "/threads", b"{}")
        finally:
            asking.close()
        script = ""
        if command:
            call = {"name": "execute", "args": {"command": command, "timeout_s": _LONG_S}}
            script = orjson.dumps({"turns": [{"tool_calls": [call]}, {"text": "done"}]}).decode()
        run = cls(api, orjson.loads(thread.body)["thread_id"], await api.open(), Events(), script)
        async with asyncio.timeout(_BEGIN_WITHIN_S):
            await run.events.begun(1)
        return run

    async def cancel(self) -> float:
        """Ask for its end; returns when the request was sent."""
        connection = await self._api.open()
        sent_at_s = asyncio.get_running_loop().time()
        path = f"/threads/{self._thread}/runs/{self.events.path}/cancel"
        try:
            answer = await connection.ask(Exchange(), "POST", path)
        finally:
            connection.close()
        if answer.status not in (200, 202):
            raise RuntimeError(f"{path} answered {answer.status}: {answer.body[:200]!r}")
        return sent_at_s

    async def close(self) -> None:
        """Let the stream go."""
        self._connection.close()
        with suppress(ConnectionLost):
            await self._stream


def _prompt(script: str) -> dict[str, object]:
    silent = orjson.dumps({"text": "at last", "delay_ms": _LONG_S * 1000}).decode()
    content = f"go on #id:{uuid.uuid4().hex} #script:{script or silent}"
    return {"messages": [{"role": "user", "content": content}]}
