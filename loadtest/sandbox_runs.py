"""Many runs at once, each of which works in a sandbox of its own: when the first output of its tool came, and its end."""

import asyncio
import time
import uuid
from dataclasses import dataclass

import orjson

from sandfleet.loadtest.bench.http import ConnectionLost, Exchange
from sandfleet.loadtest.bench.stream import EventStream
from sandfleet.loadtest.recovery.streams import Api

_WITHIN_S = 900.0
_CONNECTS_AT_ONCE = 50


@dataclass(frozen=True)
class RunTimes:
    """One run: seconds from before its submission to the first output of its tool and to its end; ``failure`` is empty
    when the whole output came and the run succeeded."""

    first_output_s: float
    end_s: float
    failure: str


class _Events(EventStream):
    """Stream modes ``custom`` (a tool's output as it comes) and ``updates``."""

    def __init__(self, marker: bytes) -> None:
        super().__init__()
        self._marker = marker
        self.first_output_at_s = 0.0
        self.ended_at_s = 0.0
        self.error = ""
        self.whole = False

    def dispatch(self, event: bytes, data: bytes, at_s: float) -> None:
        # The command is in the data as well, where the model calls the tool: the shell puts the marker together.
        if b"begun-" + self._marker in data and not self.first_output_at_s:
            self.first_output_at_s = at_s
        self.whole |= b"ended-" + self._marker in data
        if event == b"error":
            self.error = data[:300].decode(errors="replace")
        elif event == b"end":
            self.ended_at_s = at_s


async def run_all(api: Api, count: int, command_s: float) -> list[RunTimes]:
    """Submit so many runs at once, each with a command of ``command_s`` in its own sandbox, and follow them to their ends."""
    threads = await _threads(api, count)
    async with asyncio.timeout(_WITHIN_S):
        return list(await asyncio.gather(*(_one(api, thread, command_s) for thread in threads)))


async def _threads(api: Api, count: int) -> list[str]:
    connection = await api.open()
    try:
        made = [await connection.ask(Exchange(), "POST", "/threads", b"{}") for _ in range(count)]
    finally:
        connection.close()
    return [orjson.loads(thread.body)["thread_id"] for thread in made]


async def _one(api: Api, thread: str, command_s: float) -> RunTimes:
    marker = uuid.uuid4().hex
    command = f"m={marker}; echo begun-$m; sleep {command_s}; echo ended-$m"
    call = {"name": "execute", "args": {"command": command}}
    script = orjson.dumps({"turns": [{"tool_calls": [call]}, {"text": "done"}]}).decode()
    body = {
        "assistant_id": "coder",
        "stream_mode": ["updates", "custom", "messages-tuple", "tools"],
        "input": {"messages": [{"role": "user", "content": f"go on #id:{marker} #script:{script}"}]},
    }
    events = _Events(marker.encode())
    connection = await api.open()
    begun = time.monotonic()
    try:
        await connection.ask(events, "POST", f"/threads/{thread}/runs/stream", orjson.dumps(body))
    except ConnectionLost as lost:
        return RunTimes(0.0, 0.0, f"the stream broke: {lost}")
    finally:
        connection.close()
    if events.status != 200:
        return RunTimes(0.0, 0.0, f"{events.status}: {events.body[:200]!r}")
    failure = events.error or ("" if events.whole and events.ended_at_s else "the output is not whole")
    return RunTimes(events.first_output_at_s - begun, events.ended_at_s - begun, failure)
