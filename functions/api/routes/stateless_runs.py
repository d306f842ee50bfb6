"""Runs without a thread of the caller's: each gets a hidden one, which goes away after it."""

from typing import Any, Literal, Self

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api import run_creation
from sandfleet.functions.api.cancelling import cancel_run
from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import Body, Id
from sandfleet.functions.api.requests import caller, parse, read, read_body, resources, validate
from sandfleet.functions.api.responses import json_response, no_content
from sandfleet.functions.api.routes.runs import (
    cancel_action,
    create_response,
    joined_stream,
    run_response,
    stream_created,
    timing_response,
    tool_calls_response,
    wait_created,
)
from sandfleet.functions.api.run_body import RunBody
from sandfleet.shared.errors import InvalidRequest, NotFound
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store import runs
from sandfleet.shared.store.submission import STANDARD

router = APIRouter(tags=["stateless runs"])

_LARGEST_BATCH = 1000


class CancelBody(Body):
    """Which runs to cancel: some of a thread, or all of a status."""

    thread_id: Id | None = None
    run_ids: list[Id] | None = None
    status: Literal["pending", "running", "all"] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        named = self.thread_id is not None and bool(self.run_ids)
        partly = self.thread_id is not None or self.run_ids is not None
        if named == (self.status is not None) or (partly and not named):
            raise ValueError("give thread_id and run_ids, or status")
        return self


@router.post("/runs", openapi_extra=body_of(RunBody))
async def create(request: Request) -> Response:
    """Start a run in the background."""
    return await create_response(request, None)


@router.post("/runs/stream", openapi_extra=body_of(RunBody))
async def create_and_stream(request: Request) -> Response:
    """Start a run and stream its events."""
    return await stream_created(request, None)


@router.post("/runs/wait", openapi_extra=body_of(RunBody))
async def create_and_wait(request: Request) -> Response:
    """Start a run and wait for its outcome."""
    return await wait_created(request, None)


@router.post("/runs/batch")
async def create_batch(request: Request) -> Response:
    """Start several runs in the background: all or none."""
    value: Any = parse(request, await read_body(request))
    if not isinstance(value, list) or not 1 <= len(value) <= _LARGEST_BATCH:
        raise InvalidRequest(f"The body must be a list of 1 to {_LARGEST_BATCH} runs.")
    bodies = [validate(RunBody, item) for item in value]
    plans = [await run_creation.plan(request, None, body, STANDARD) for body in bodies]
    created = await run_creation.create_all(request, plans)
    owner = caller(request)
    return json_response([await run_creation.view(request, owner, run) for run in created])


@router.post("/runs/cancel", openapi_extra=body_of(CancelBody))
async def cancel_many(request: Request) -> Response:
    """Cancel several runs; those that are over already stay as they are."""
    body = await read(request, CancelBody)
    found, owner, action = resources(request), caller(request), cancel_action(request)
    if body.status is not None:
        statuses = runs.ACTIVE if body.status == "all" else (body.status,)
        run_ids = await runs.active(found.pool, owner, statuses)
    else:
        assert body.thread_id is not None
        run_ids = body.run_ids or []
        missing = set(run_ids) - await runs.existing(found.pool, owner, body.thread_id, run_ids)
        if missing:
            raise NotFound(f"Run {min(missing)} not found; nothing was cancelled.")
    for run_id in run_ids:
        try:
            await cancel_run(found, RunKey(*owner, run_id), action)
        except NotFound:
            continue  # it is over
    return no_content()


@router.get("/runs/{run_id}")
async def get(request: Request, run_id: str) -> Response:
    """One run, wherever it runs."""
    return await run_response(request, None, run_id)


@router.get("/runs/{run_id}/stream")
async def join_stream(request: Request, run_id: str) -> Response:
    """Events of a run: after ``Last-Event-ID``, or from now on."""
    return await joined_stream(request, None, run_id)


@router.get("/runs/{run_id}/timing")
async def timing(request: Request, run_id: str) -> Response:
    """When each stage of a run began, the latencies between them in ms, and what it has used of models."""
    return await timing_response(request, None, run_id)


@router.get("/runs/{run_id}/tool_calls")
async def list_tool_calls(request: Request, run_id: str) -> Response:
    """The run's tool calls in the order of their start."""
    return await tool_calls_response(request, None, run_id)
