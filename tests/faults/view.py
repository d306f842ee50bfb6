"""What a client sees of one run that it follows to the end, through whatever breaks in between."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx


class Seen(NamedTuple):
    """One event; ``id`` is None for those that a client cannot resume from."""

    id: str | None
    event: str
    data: Any
    at: float
    """`time.monotonic` when it came."""


@dataclass
class View:
    """The events of a run in the order in which a client got them, and how often its stream broke."""

    thread_id: str
    run_id: str
    events: list[Seen] = field(default_factory=list)
    breaks: int = 0

    @property
    def names(self) -> list[str]:
        return [each.event for each in self.events]

    @property
    def ids(self) -> list[tuple[int, int]]:
        found = [each.id for each in self.events if each.id is not None]
        return [(int(a), int(b)) for a, _, b in (each.partition("-") for each in found)]

    def data(self, event: str) -> list[Any]:
        """What came under a name."""
        return [each.data for each in self.events if each.event == event]

    def faults(self, journal: list[tuple[int, int, str]]) -> list[str]:
        """What is wrong with it, given the run's journal as (attempt, seq, event)."""
        found = []
        if self.ids != sorted(set(self.ids)):
            found.append("out of order, or twice")
        if missing := {(a, s) for a, s, _ in journal} - set(self.ids):
            found.append(f"missing: {sorted(missing)}")
        if self.names.count("end") != 1 or self.names[-1:] != ["end"]:
            found.append("no end, or not one")
        before: tuple[int, int] | None = None
        announced = False
        for each in self.events:
            if each.id is None:
                if announced:
                    found.append("two announcements of one hole")
                announced = True
                continue
            attempt, seq = (int(part) for part in each.id.split("-"))
            expected = before[1] + 1 if before is not None and before[0] == attempt else 0
            if seq != expected and not announced:
                found.append(f"a silent hole before {each.id}")
            if seq == expected and announced:
                found.append(f"a hole was announced before {each.id} that is none")
            announced, before = False, (attempt, seq)
        return found


async def watch(http: httpx.AsyncClient, view: View) -> View:
    """Follow a run from its start to its end; a stream that breaks is taken up behind the last event that was whole."""
    path = f"/threads/{view.thread_id}/runs/{view.run_id}/stream"
    cursor = "0"
    while not view.events or view.events[-1].event != "end":
        try:
            async with http.stream("GET", path, headers={"last-event-id": cursor}) as answer:
                if answer.status_code == 503:
                    await asyncio.sleep(0.2)
                    continue
                assert answer.status_code == 200, answer.status_code
                block: dict[str, str] = {}
                async for line in answer.aiter_lines():
                    if line:
                        name, _, value = line.partition(": ")
                        block[name] = value
                    elif block:
                        cursor = block.get("id", cursor)
                        if "event" in block:
                            view.events.append(
                                Seen(
                                    block.get("id"),
                                    block["event"],
                                    json.loads(block["data"]),
                                    time.monotonic(),
                                )
                            )
                        block = {}
        except httpx.HTTPError:
            view.breaks += 1
            await asyncio.sleep(0.2)
    return view
