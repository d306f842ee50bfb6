"""Clients that read a run's stream from its first event to its last, and are cut off all the time."""

import asyncio
import random
from typing import NamedTuple

import httpx

from tests.chaos.api import Api

_FIRST_LIFE = (1, 30)  # events that a connection brings before the client drops it
_PAUSE_S = 0.2


class Seen(NamedTuple):
    """An event as it came over the wire; ``id`` is empty for one without. ``connection`` counts from 1."""

    id: str
    event: str
    data: str
    connection: int = 1


class Follower:
    """Reads one stream. ``seen`` is complete when ``finished`` is done; ``gone``: the run was undone meanwhile."""

    def __init__(self, api: Api, path: str, seed: str) -> None:
        self.seen: list[Seen] = []
        self.gone = False
        self.connections = 0
        self.finished = asyncio.create_task(self._follow(api, path, random.Random(seed)))

    async def _follow(self, api: Api, path: str, source: random.Random) -> None:
        for client in api.clients():
            cursor = next((seen.id for seen in reversed(self.seen) if seen.id), "0")
            life = source.randint(*_FIRST_LIFE) if source.random() < 0.6 else None
            self.connections += 1
            try:
                async with api.stream(client, path, cursor) as response:
                    if response.status_code == 404:
                        self.gone = True
                        return
                    if response.status_code == 200 and await self._read(response, life):
                        return
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, response: httpx.Response, life: int | None) -> bool:
        """Whether the stream came to its end. ``life``: leave after so many events."""
        left = life
        fields: dict[str, str] = {}
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                fields[name] = value
                continue
            if "event" in fields:
                event_id, data = fields.get("id", ""), fields.get("data", "")
                self.seen.append(Seen(event_id, fields["event"], data, self.connections))
                if fields["event"] == "end":
                    return True
                left = None if left is None else left - 1
                if left == 0:
                    return False
            fields = {}
        return False
