"""States of threads: the newest, one by its checkpoint, the history; and the update that an executor does."""

from typing import Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import Body, JsonObject, Limit, Text
from sandfleet.functions.api.requests import (
    caller,
    parse_id,
    query_bool,
    query_int,
    query_list,
    read,
    resources,
)
from sandfleet.functions.api.responses import json_response
from sandfleet.functions.api.run_body import CheckpointBody
from sandfleet.functions.api.state_update import StateUpdate, update_state
from sandfleet.shared.errors import InvalidRequest, NotFound
from sandfleet.shared.store import state_rows, threads
from sandfleet.shared.store.state_rows import State

router = APIRouter(tags=["thread state"])

_FIELDS = frozenset(state_rows.empty())


def _check_select(select: list[str]) -> list[str]:
    for name in select:
        if name not in _FIELDS and not name.startswith("values."):
            raise ValueError(f"select: {name[:100]!r} is no field of a state")
    return select


class _Selecting(Body):
    select: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _known_fields(self) -> "_Selecting":
        _check_select(self.select)
        return self


class AtCheckpointBody(_Selecting):
    """Which state: the checkpoint's, or the newest of its namespace when it has no id."""

    checkpoint: CheckpointBody
    subgraphs: bool = False


class HistoryBody(_Selecting):
    """Which states, newest first."""

    limit: Limit = 10
    before: Text | JsonObject = Field(
        "", description="A checkpoint's id, a checkpoint, or {configurable: checkpoint}."
    )
    metadata: JsonObject = Field(default_factory=dict)
    checkpoint: CheckpointBody = Field(default_factory=CheckpointBody)


class UpdateBody(Body):
    """What to write, as which node, on top of which checkpoint."""

    values: JsonObject | list[Any] | None = None
    as_node: str = ""
    checkpoint: CheckpointBody = Field(default_factory=CheckpointBody)
    checkpoint_id: Text = ""


@router.get("/threads/{thread_id}/state")
async def get(request: Request, thread_id: str) -> Response:
    """The newest state. Query: subgraphs, select."""
    found, owner, thread = resources(request), caller(request), parse_id(thread_id, "thread_id")
    subgraphs, select = query_bool(request, "subgraphs"), _query_select(request)
    await threads.require(found.pool, owner, thread)
    state = await state_rows.newest(found.pool, owner, thread, subgraphs=subgraphs)
    return json_response(_selected(state or state_rows.empty(), select))


@router.post("/threads/{thread_id}/state/checkpoint", openapi_extra=body_of(AtCheckpointBody))
async def at_checkpoint(request: Request, thread_id: str) -> Response:
    """The state at a checkpoint, of the thread or of a subgraph."""
    found, owner, thread = resources(request), caller(request), parse_id(thread_id, "thread_id")
    body = await read(request, AtCheckpointBody)
    await threads.require(found.pool, owner, thread)
    ns, checkpoint_id = body.checkpoint.checkpoint_ns, body.checkpoint.checkpoint_id
    if checkpoint_id:
        state = await state_rows.by_id(found.pool, owner, thread, checkpoint_id, ns, subgraphs=body.subgraphs)
        if state is None:
            raise NotFound("Checkpoint not found.")
    else:
        state = await state_rows.newest(found.pool, owner, thread, ns, subgraphs=body.subgraphs)
    return json_response(_selected(state or state_rows.empty(), body.select))


@router.get("/threads/{thread_id}/state/{checkpoint_id}")
async def get_by_id(request: Request, thread_id: str, checkpoint_id: str) -> Response:
    """The state at a checkpoint of the thread. Query: subgraphs, select."""
    found, owner, thread = resources(request), caller(request), parse_id(thread_id, "thread_id")
    wanted = str(parse_id(checkpoint_id, "checkpoint_id"))
    subgraphs, select = query_bool(request, "subgraphs"), _query_select(request)
    await threads.require(found.pool, owner, thread)
    state = await state_rows.by_id(found.pool, owner, thread, wanted, subgraphs=subgraphs)
    if state is None:
        raise NotFound("Checkpoint not found.")
    return json_response(_selected(state, select))


@router.post("/threads/{thread_id}/state", openapi_extra=body_of(UpdateBody))
async def update(request: Request, thread_id: str) -> Response:
    """Write to the state as a node would. An executor does it; the thread must not be busy."""
    thread = parse_id(thread_id, "thread_id")
    body = await read(request, UpdateBody)
    checkpoint = body.checkpoint.of_thread(thread, body.checkpoint_id)
    wanted = StateUpdate(body.values, body.as_node or None, checkpoint)
    return json_response(await update_state(resources(request), caller(request), thread, wanted))


@router.post("/threads/{thread_id}/history", openapi_extra=body_of(HistoryBody))
async def history(request: Request, thread_id: str) -> Response:
    """States, newest first."""
    thread = parse_id(thread_id, "thread_id")
    body = await read(request, HistoryBody)
    return await _history(request, thread, body, _before(body.before))


@router.get("/threads/{thread_id}/history")
async def get_history(request: Request, thread_id: str) -> Response:
    """States, newest first. Query: limit, before (a checkpoint's id), select."""
    thread = parse_id(thread_id, "thread_id")
    limit = query_int(request, "limit", 10, 1, 1000)
    body = HistoryBody(limit=limit, select=_query_select(request))
    return await _history(request, thread, body, request.query_params.get("before") or None)


async def _history(request: Request, thread: Any, body: HistoryBody, before: str | None) -> Response:
    found, owner = resources(request), caller(request)
    await threads.require(found.pool, owner, thread)
    states = await state_rows.history(
        found.pool,
        owner,
        thread,
        ns=body.checkpoint.checkpoint_ns,
        limit=body.limit,
        before=before,
        checkpoint_id=body.checkpoint.checkpoint_id,
        metadata=body.metadata or None,
    )
    return json_response([_selected(state, body.select) for state in states])


def _before(given: str | JsonObject) -> str | None:
    """The id in any of the forms that clients send. Raises InvalidRequest when there is none in it."""
    if isinstance(given, str):
        return given or None
    holder = given.get("configurable", given)
    checkpoint_id = holder.get("checkpoint_id") if isinstance(holder, dict) else None
    if not isinstance(checkpoint_id, str):
        raise InvalidRequest("before: name a checkpoint_id")
    return checkpoint_id


def _query_select(request: Request) -> list[str]:
    try:
        return _check_select(query_list(request, "select"))
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _selected(state: State, select: list[str]) -> State:
    """The chosen fields; of ``values`` the chosen keys, unless it was chosen whole."""
    if not select:
        return state
    shown = {name: state[name] for name in select if name in _FIELDS}
    keys = [name.removeprefix("values.") for name in select if name.startswith("values.")]
    values = state["values"]
    if keys and "values" not in shown and isinstance(values, dict):
        shown["values"] = {key: values[key] for key in keys if key in values}
    return shown
