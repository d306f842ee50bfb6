"""Runs on threads, and what a run offers below its own path."""

from dataclasses import asdict
from functools import partial
from typing import Any, get_args
from uuid import UUID

import orjson
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api import run_creation
from sandfleet.functions.api.cancelling import cancel_run, tell
from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.outcome import outcome
from sandfleet.functions.api.requests import (
    caller,
    parse,
    parse_id,
    query_bool,
    query_int,
    query_list,
    read_body,
    resources,
    validate,
)
from sandfleet.functions.api.responses import json_response, no_content, utc
from sandfleet.functions.api.run_body import RunBody, StreamMode
from sandfleet.functions.api.run_streams import run_path, stream_response, wait_response
from sandfleet.functions.api.run_view import SELECTABLE, run_view
from sandfleet.shared.errors import InvalidRequest
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store import runs, tool_calls, usage
from sandfleet.shared.store.cancellation import CancelAction
from sandfleet.shared.store.runs import Times
from sandfleet.shared.store.submission import INTERACTIVE, STANDARD
from sandfleet.shared.store.usage import Sums

router = APIRouter(tags=["runs"])

_STATUSES = ", ".join(runs.STATUSES)


async def created(request: Request, thread_id: UUID | None, run_class: int) -> run_creation.Created:
    """Read the body of a creation and submit the run."""
    raw = await read_body(request)
    body = validate(RunBody, parse(request, raw))
    return await run_creation.create(
        request, await run_creation.plan(request, thread_id, body, run_class, raw)
    )


async def create_response(request: Request, thread_id: UUID | None) -> Response:
    """Accept a run and answer at once with the run object."""
    run = await created(request, thread_id, STANDARD)
    path = run_path(run.thread_id, run.run_id) if thread_id else f"/runs/{run.run_id}"
    return json_response(
        await run_creation.view(request, caller(request), run), headers={"content-location": path}
    )


async def stream_created(request: Request, thread_id: UUID | None) -> Response:
    """Accept a run and stream it from its first event."""
    run = await created(request, thread_id, INTERACTIVE)
    key = RunKey(*caller(request), run.run_id)
    return stream_response(
        request,
        key,
        run.thread_id,
        cursor=None,
        fresh=not run.accepted.replayed,
        cancels=run.plan.cancels_on_disconnect,
    )


async def wait_created(request: Request, thread_id: UUID | None) -> Response:
    """Accept a run and answer with its outcome."""
    run = await created(request, thread_id, INTERACTIVE)
    owner = caller(request)
    return await wait_response(
        request,
        RunKey(*owner, run.run_id),
        run.thread_id,
        partial(outcome, resources(request).pool, owner, run.thread_id, run.run_id),
        fresh=not run.accepted.replayed,
        cancels=run.plan.cancels_on_disconnect,
    )


@router.post("/threads/{thread_id}/runs", openapi_extra=body_of(RunBody))
async def create(request: Request, thread_id: str) -> Response:
    """Start a run in the background."""
    return await create_response(request, parse_id(thread_id, "thread_id"))


@router.post("/threads/{thread_id}/runs/stream", openapi_extra=body_of(RunBody))
async def create_and_stream(request: Request, thread_id: str) -> Response:
    """Start a run and stream its events."""
    return await stream_created(request, parse_id(thread_id, "thread_id"))


@router.post("/threads/{thread_id}/runs/wait", openapi_extra=body_of(RunBody))
async def create_and_wait(request: Request, thread_id: str) -> Response:
    """Start a run and wait for its outcome."""
    return await wait_created(request, parse_id(thread_id, "thread_id"))


@router.get("/threads/{thread_id}/runs")
async def list_runs(request: Request, thread_id: str) -> Response:
    """Runs of a thread, newest first. Query: limit, offset, status, select."""
    select = query_list(request, "select")
    for name in select:
        if name not in SELECTABLE:
            raise InvalidRequest(f"select: {name!r} is no field of a run")
    status = request.query_params.get("status") or None
    if status is not None and status not in runs.STATUSES:
        raise InvalidRequest(f"status: use one of {_STATUSES}")
    found = await runs.of_thread(
        resources(request).pool,
        caller(request),
        parse_id(thread_id, "thread_id"),
        status=status,
        limit=query_int(request, "limit", 10, 1, 1000),
        offset=query_int(request, "offset", 0, 0, 2**31 - 1),
    )
    views = [run_view(run) for run in found]
    return json_response([{k: v[k] for k in select} for v in views] if select else views)


@router.get("/threads/{thread_id}/runs/{run_id}")
async def get(request: Request, thread_id: str, run_id: str) -> Response:
    """One run."""
    return await run_response(request, parse_id(thread_id, "thread_id"), run_id)


@router.delete("/threads/{thread_id}/runs/{run_id}")
async def delete(request: Request, thread_id: str, run_id: str) -> Response:
    """Remove a run with its checkpoints; one that is not over ends first."""
    found = resources(request)
    run = parse_id(run_id, "run_id")
    tell(found, await runs.delete(found.pool, caller(request), parse_id(thread_id, "thread_id"), run))
    return no_content()


@router.get("/threads/{thread_id}/runs/{run_id}/stream")
async def join_stream(request: Request, thread_id: str, run_id: str) -> Response:
    """Events of a run: after ``Last-Event-ID``, or from now on. Query: stream_mode, cancel_on_disconnect."""
    return await joined_stream(request, parse_id(thread_id, "thread_id"), run_id)


@router.get("/threads/{thread_id}/runs/{run_id}/join")
async def join(request: Request, thread_id: str, run_id: str) -> Response:
    """Wait for a run's outcome."""
    found, owner = resources(request), caller(request)
    thread, run = parse_id(thread_id, "thread_id"), parse_id(run_id, "run_id")
    state = await runs.state(found.pool, owner, thread, run)
    return await wait_response(
        request,
        RunKey(*owner, run),
        thread,
        partial(outcome, found.pool, owner, thread, run),
        cancels=query_bool(request, "cancel_on_disconnect")
        or (state.cancel_on_disconnect and state.status in runs.ACTIVE),
    )


@router.post("/threads/{thread_id}/runs/{run_id}/cancel")
async def cancel(request: Request, thread_id: str, run_id: str) -> Response:
    """End a run. Query: wait (answer after its end), action (``interrupt``, or ``rollback`` to undo it)."""
    found, owner = resources(request), caller(request)
    thread, run = parse_id(thread_id, "thread_id"), parse_id(run_id, "run_id")
    action, wait = cancel_action(request), query_bool(request, "wait")
    await runs.get(found.pool, owner, thread, run)
    key = RunKey(*owner, run)
    await cancel_run(found, key, action)
    if not wait:
        return Response(status_code=202)

    async def done() -> bytes:
        return b"{}"

    return await wait_response(request, key, thread, done)


@router.get("/threads/{thread_id}/runs/{run_id}/timing")
async def timing(request: Request, thread_id: str, run_id: str) -> Response:
    """When each stage of a run began, the latencies between them in ms, and what it has used of models."""
    return await timing_response(request, parse_id(thread_id, "thread_id"), run_id)


@router.get("/threads/{thread_id}/runs/{run_id}/tool_calls")
async def list_tool_calls(request: Request, thread_id: str, run_id: str) -> Response:
    """The run's tool calls in the order of their start: which, by which attempt, and how each stands."""
    return await tool_calls_response(request, parse_id(thread_id, "thread_id"), run_id)


async def run_response(request: Request, thread_id: UUID | None, run_id: str) -> Response:
    """The run object."""
    run = await runs.get(resources(request).pool, caller(request), thread_id, parse_id(run_id, "run_id"))
    return json_response(run_view(run))


async def joined_stream(request: Request, thread_id: UUID | None, run_id: str) -> Response:
    """Stream a run that exists already."""
    owner = caller(request)
    modes = stream_modes(request)
    cancels = query_bool(request, "cancel_on_disconnect")
    state = await runs.state(resources(request).pool, owner, thread_id, parse_id(run_id, "run_id"))
    cursor = request.headers.get("last-event-id")
    query: dict[str, list[str]] = {}
    if modes:
        query["stream_mode"] = modes
    if cancels:
        query["cancel_on_disconnect"] = ["true"]
    return stream_response(
        request,
        RunKey(*owner, state.run_id),
        state.thread_id,
        cursor=cursor,
        live_only=not cursor,
        modes=modes,
        cancels=(cancels or state.cancel_on_disconnect) and state.status in runs.ACTIVE,
        query=query,
    )


def stream_modes(request: Request) -> list[str]:
    """The union of all ``stream_mode`` in the query, each a mode or a JSON list of modes."""
    modes: dict[str, None] = {}
    for text in query_list(request, "stream_mode"):
        try:
            listed = orjson.loads(text) if text.startswith("[") else [text]
        except orjson.JSONDecodeError:
            listed = [text]
        for mode in listed:
            if mode not in get_args(StreamMode):
                raise InvalidRequest(f"stream_mode: use {', '.join(get_args(StreamMode))}")
            modes[mode] = None
    return list(modes)


def cancel_action(request: Request) -> CancelAction:
    """How to cancel, from the query."""
    action = request.query_params.get("action") or "interrupt"
    if action == "interrupt":
        return "interrupt"
    if action == "rollback":
        return "rollback"
    raise InvalidRequest("action: use interrupt or rollback")


_LATENCIES = (
    ("queue_ms", "ready_at", "started_at"),
    ("accept_to_start_ms", "created_at", "started_at"),
    ("prepare_ms", "started_at", "prepared_at"),
    ("accept_to_model_ms", "created_at", "first_model_request_at"),
    ("first_output_ms", "created_at", "first_output_at"),
    ("run_ms", "started_at", "finished_at"),
    ("total_ms", "created_at", "finished_at"),
)


async def timing_response(request: Request, thread_id: UUID | None, run_id: str) -> Response:
    """Raw times and derived latencies, and usage; what has not happened, or is forgotten, is null."""
    run = parse_id(run_id, "run_id")
    pool, owner = resources(request).pool, caller(request)
    times = await runs.times(pool, owner, thread_id, run)
    used = await usage.of_run(pool, owner, thread_id, run)
    return json_response({"run_id": run, **_times(times), "usage": None if used is None else _usage(used)})


def _times(times: Times) -> dict[str, Any]:
    raw = {name: getattr(times, name) for name in Times.__dataclass_fields__}
    latencies = {
        name: None if raw[a] is None or raw[b] is None else (raw[b] - raw[a]).total_seconds() * 1000
        for name, a, b in _LATENCIES
    }
    return {**{name: utc(time) for name, time in raw.items()}, "latencies": latencies}


def _usage(used: Sums) -> dict[str, Any]:
    return {**asdict(used.total), "models": {name: asdict(of_model) for name, of_model in used.by_name}}


async def tool_calls_response(request: Request, thread_id: UUID | None, run_id: str) -> Response:
    """The ledger of a run, without arguments and results."""
    run = parse_id(run_id, "run_id")
    calls = await tool_calls.of_run(resources(request).pool, caller(request), thread_id, run)
    return json_response(
        [
            {**asdict(call), "started_at": utc(call.started_at), "finished_at": utc(call.finished_at)}
            for call in calls
        ]
    )


@router.post("/threads/{thread_id}/runs/crons", include_in_schema=False)
@router.post("/runs/crons", include_in_schema=False)
async def no_crons() -> Response:
    """Said here, or the path would pass for a run of this name."""
    raise HTTPException(404)  # which says what is offered, as for any path of crons
