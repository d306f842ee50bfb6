"""A command in a sandbox, followed to its end, also when its host was away for a while in the middle."""

import asyncio
import base64
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson

from sandfleet.functions.api.host_ask import Ask
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.sandbox_errors import HostRefused
from sandfleet.functions.api.sandbox_use import Use
from sandfleet.shared.errors import HostAway, HostBroke, HostUnavailable

Event = tuple[str, bytes | dict[str, Any]]

_GRACE_S = 30.0  # for a command beyond its own time limit: the host's kill ladder takes less
_LONGEST_S = 24 * 3600.0  # no sandbox lives so long
_RESUME_S = 30.0  # how long a command goes on in its sandbox while nobody follows it
_PAUSE_S = 0.25
_NOT_READY = 503  # of a host that has just started
_UNKNOWN = (
    "The sandbox's host was away while the command ran, and its end is not known: it was killed, or had never begun. "
    "The sandbox and its files are there."
)


async def follow(found: Resources, use: Use, command: dict[str, Any]) -> AsyncGenerator[Event]:
    """Events of a command: ``started`` with the sandbox's generation, ``stdout`` and ``stderr`` with bytes, then one ``exit``
    with the result.

    ``command`` is the body of the host's ``POST /sandbox/exec``. Closing this early kills the command with all it started.
    Raises what `Use.open` does, and HostBroke if the command's end cannot be known.
    """
    known = {"stdout": 0, "stderr": 0}
    request = {**command, "name": uuid.uuid4().hex}
    silence_s = (command.get("timeout_s") or _LONGEST_S) + _GRACE_S
    begun, started, answered, patient_until = False, False, False, 0.0
    while True:
        asked = {**request, "resume": known} if begun else request
        try:
            generation, response = await use.open_at(
                Ask("POST", "/sandbox/exec", json=asked, silence_s=silence_s)
            )
            begun = answered = True
            if not started:
                started = True
                yield "started", {"generation": generation}
            async with aclosing(_events(found.hosts.pieces(response))) as events:
                async for kind, value in events:
                    if isinstance(value, bytes):
                        known[kind] += len(value)
                    elif kind == "error":
                        raise await use.explained(generation, _refused(value))
                    yield kind, value
                    if kind == "exit":
                        return
            raise HostBroke(_UNKNOWN)
        except HostBroke:  # the command goes on for a while, and may be followed again
            now = time.monotonic()
            if answered or not begun:
                patient_until = now + _RESUME_S
            elif now > patient_until:  # something takes connections there, and is no host
                raise HostBroke(_UNKNOWN) from None
            begun, answered = True, False
        except HostRefused as refused:
            if refused.code == "no_command":
                raise HostBroke(_UNKNOWN) from None
            if not begun or refused.status != _NOT_READY or time.monotonic() > patient_until:
                raise
        except HostUnavailable as error:
            if not begun or not isinstance(error, HostAway) or time.monotonic() > patient_until:
                raise
        await asyncio.sleep(_PAUSE_S)


def _refused(event: dict[str, Any]) -> HostRefused:
    return HostRefused(event["code"], event["status"], event["message"], None)


async def _events(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[Event]:
    """Lines of JSON from a body."""
    rest: list[bytes] = []
    async with aclosing(pieces):
        async for piece in pieces:
            *lines, tail = piece.split(b"\n")
            for line in lines:
                rest.append(line)
                event = orjson.loads(b"".join(rest))
                rest.clear()
                kind = event.pop("event")
                yield kind, base64.b64decode(event["data"]) if "data" in event else event
            rest.append(tail)
