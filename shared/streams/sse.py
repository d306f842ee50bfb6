"""Server-sent events: the bytes of an event, and a response body with heartbeats."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sandfleet.shared.streams.follow import StreamEvent

HEARTBEAT = b": heartbeat\r\n\r\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Headers of a streaming response beside its content type."""
MEDIA_TYPE = "text/event-stream"

_MOST = 256 * 1024  # bytes of frames that are gathered before the client has taken the last ones


def frame(event: StreamEvent) -> bytes:
    """One event as the reference server frames it: CRLF, fields in the order event, data, id; no id line without id."""
    name, data = event.event, event.data
    if "\n" in name or "\r" in name:  # a node's name may hold anything
        name = name.replace("\r", " ").replace("\n", " ")
    if "\n" in data or "\r" in data:  # line breaks between the tokens of JSON; the decoder joins them with \n
        data = "\r\ndata: ".join(data.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    last = f"\r\nid: {event.id}\r\n\r\n" if event.id else "\r\n\r\n"
    return f"event: {name}\r\ndata: {data}{last}".encode()


async def body(events: AsyncGenerator[StreamEvent], heartbeat_s: float) -> AsyncGenerator[bytes]:
    """Response body for ``events``: whole frames only, those at hand in one piece, and a comment every ``heartbeat_s``
    of silence. Closing it closes ``events``.
    """
    loop = asyncio.get_running_loop()
    frames: list[bytes] = []
    size = 0
    wake = asyncio.Event()
    taken = asyncio.Event()
    heartbeat_due = False

    async def gather() -> None:
        nonlocal size
        try:
            async with aclosing(events):
                async for event in events:
                    frames.append(frame(event))
                    size += len(frames[-1])
                    wake.set()
                    if size > _MOST:
                        taken.clear()
                        await taken.wait()
        finally:
            wake.set()

    def tick() -> None:
        nonlocal heartbeat_due
        heartbeat_due = True
        wake.set()

    gathering = asyncio.create_task(gather())
    sent_at = quiet_since = loop.time()
    timer = loop.call_at(sent_at + heartbeat_s, tick)
    try:
        while True:
            await wake.wait()
            wake.clear()
            if frames:
                piece = b"".join(frames)
                frames.clear()
                size = 0
                taken.set()
                yield piece
                sent_at = loop.time()
            if heartbeat_due:
                heartbeat_due = False
                # One timer per heartbeat, not per event: after events it is only moved on.
                if sent_at == quiet_since:
                    yield HEARTBEAT
                    sent_at = loop.time()
                quiet_since = sent_at
                timer = loop.call_at(sent_at + heartbeat_s, tick)
            if gathering.done() and not frames:
                await gathering
                return
            if frames or gathering.done():
                wake.set()
    finally:
        timer.cancel()
        while not gathering.done():  # a library below may swallow a cancellation
            gathering.cancel()
            await asyncio.wait([gathering], timeout=1.0)
