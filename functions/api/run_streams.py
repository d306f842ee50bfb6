"""Streaming a run to a client, or holding a request until the run is over."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from urllib.parse import urlencode
from uuid import UUID

import orjson
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.abandonment import Watcher
from sandfleet.functions.api.live import Cut, Live, padded
from sandfleet.functions.api.outcome import state_of
from sandfleet.functions.api.requests import resources
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.responses import error_response
from sandfleet.shared.errors import Unavailable
from sandfleet.shared.ids import RunKey
from sandfleet.shared.streams import sse
from sandfleet.shared.streams.follow import StreamEvent, filter_modes, follow

# An event with an id and without data is never dispatched, but it is where a client resumes that is cut off before the
# first event: at the start.
_FROM_START = b"id: 0-0\r\n\r\n"


def run_path(thread_id: UUID, run_id: UUID) -> str:
    """The run's path, always below its thread, also for a stateless run: the SDK asks there how the run stands."""
    return f"/threads/{thread_id}/runs/{run_id}"


def stream_response(
    request: Request,
    key: RunKey,
    thread_id: UUID,
    *,
    cursor: str | None,
    live_only: bool = False,
    fresh: bool = False,
    modes: Collection[str] = (),
    cancels: bool = False,
    query: dict[str, list[str]] | None = None,
) -> Response:
    """The events of a run as server-sent events.

    ``fresh``: the run was made by this request. ``modes`` filters. ``cancels``: the run must not go on without a client.
    ``query`` is kept in ``Location``, so that a reconnect gets the same.
    """
    found = resources(request)
    location = f"{run_path(thread_id, key.run_id)}/stream"
    if query:
        location += "?" + urlencode(query, doseq=True)
    watcher = Watcher(found, key) if cancels else None

    async def body() -> AsyncGenerator[bytes]:
        window_s = found.settings.response_window_s
        try:
            if not live_only and cursor is None:
                yield _FROM_START
            if window_s > 0:
                opening = orjson.dumps({"run_id": str(key.run_id)}).decode()
                yield sse.frame(StreamEvent(None, "metadata", opening))
            events = follow(
                found.hub,
                key,
                cursor,
                state=_state(found),
                live_only=live_only,
                window_s=window_s,
                fresh=fresh,
            )
            frames = sse.body(
                filter_modes(events, modes) if modes else events, found.settings.sse_heartbeat_s
            )
            async with aclosing(events), aclosing(frames):
                async for frame in frames:
                    yield frame
        finally:
            if watcher is not None:
                watcher.stop()

    return Live(
        body(),
        media_type=sse.MEDIA_TYPE,
        headers={
            **sse.HEADERS,
            "location": location,
            "content-location": run_path(thread_id, key.run_id),
        },
        closing=found.closing,
        may_end_early=True,
        on_disconnect=watcher.left if watcher else None,
    )


async def wait_response(
    request: Request,
    key: RunKey,
    thread_id: UUID,
    result: Callable[[], Awaitable[bytes]],
    *,
    fresh: bool = False,
    cancels: bool = False,
) -> Response:
    """Hold the request until the run is over, then answer with ``result()``.

    Where the response is buffered, one that takes longer than the window answers 503 and goes on at ``Location``; else
    it is padded, and broken off at the end of the window, never ended early.
    """
    found = resources(request)
    window_s = found.settings.response_window_s or None
    path = run_path(thread_id, key.run_id)
    headers = {**sse.HEADERS, "location": f"{path}/join", "content-location": path}

    async def waited() -> bytes:
        await wait_for_end(found, key, fresh=fresh)
        return await result()

    if found.buffered:
        try:
            body = await asyncio.wait_for(waited(), window_s)
        except TimeoutError:
            later = Unavailable("The run goes on. Join it at the path in Location.", retry_after_s=1)
            return error_response(later, headers)
        return Response(body, 200, headers, media_type="application/json")

    async def within_window() -> bytes:
        try:
            return await asyncio.wait_for(waited(), window_s)
        except TimeoutError:
            raise Cut from None

    watcher = Watcher(found, key) if cancels else None

    async def chunks() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(padded(within_window())) as body:
                async for chunk in body:
                    yield chunk
        finally:
            if watcher is not None:
                watcher.stop()

    return Live(
        chunks(),
        media_type="application/json",
        headers=headers,
        closing=found.closing,
        may_end_early=False,
        on_disconnect=watcher.left if watcher else None,
    )


async def wait_for_end(found: Resources, key: RunKey, *, fresh: bool = False) -> None:
    """Return when the run is over or gone."""
    events = follow(found.hub, key, None, state=_state(found), live_only=not fresh, fresh=fresh)
    async with aclosing(events):
        async for event in events:
            if event.event == "end":
                return


def _state(found: Resources) -> Callable[[RunKey], Awaitable[str]]:
    return lambda key: state_of(found.pool, key)
