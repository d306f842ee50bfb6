"""Snapshots of workspaces, of sandboxes and of runs; sandboxes that begin with one."""

from typing import Any
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api import sandbox_use
from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import ExactBody, Id, Metadata, Text
from sandfleet.functions.api.host_ask import Ask
from sandfleet.functions.api.requests import (
    caller,
    idempotency,
    parse,
    parse_id,
    query_int,
    query_only,
    read,
    read_body,
    resources,
    unless_gone,
    validate,
)
from sandfleet.functions.api.responses import json_response, no_content, page_headers, utc
from sandfleet.functions.api.routes.sandboxes import created_response, sandbox_key, sandbox_view, use_of
from sandfleet.shared.errors import NotFound, SandfleetError
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import runs, sandboxes, snapshots
from sandfleet.shared.store.sandboxes import Wish
from sandfleet.shared.store.snapshots import Snapshot

router = APIRouter(tags=["sandboxes"])


class ForkSandbox(ExactBody):
    """A new sandbox with the files of another."""

    snapshot_id: Id | None = None
    """Of the other sandbox; left out, one is taken now."""
    template: Text | None = Field(None, min_length=1, max_length=63)
    """The other's if left out."""
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    metadata: Metadata = Field(default_factory=dict)


class RestoreSandbox(ExactBody):
    """Which files a sandbox is to have again."""

    snapshot_id: Id


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
async def take(request: Request, sandbox_id: str) -> Response:
    """Keep the workspace as it is now; the snapshot."""
    taken = await _take(request, sandbox_id)
    return json_response(_view(await _snapshot(request, taken)), 201, {"location": f"/snapshots/{taken}"})


@router.get("/sandboxes/{sandbox_id}/snapshots")
async def of_sandbox(request: Request, sandbox_id: str) -> Response:
    """A sandbox's snapshots, newest first, also after its end. Query: limit, offset."""
    key = sandbox_key(request, sandbox_id)
    answer, any_found = await _page(request, key.run_id)
    if not any_found and await sandboxes.get(resources(request).pool, key) is None:
        raise NotFound(sandbox_use.MISSING)
    return answer


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201, openapi_extra=body_of(ForkSandbox))
async def fork(request: Request, sandbox_id: str) -> Response:
    """Make a sandbox that begins with a snapshot of this one; with an Idempotency-Key once, as for any other."""
    found, key = resources(request), sandbox_key(request, sandbox_id)
    raw = await read_body(request)
    body = validate(ForkSandbox, parse(request, raw))
    once = idempotency(request, raw)
    made = await unless_gone(request, sandbox_use.made_by(found, key.owner, *once))
    if made is not None:
        return created_response(made)
    row = await sandboxes.get(found.pool, key)
    if row is None:
        raise NotFound(sandbox_use.MISSING)
    taken = None
    if body.snapshot_id is None:
        snapshot_id = taken = await _take(request, sandbox_id)
    else:
        snapshot_id = (await _snapshot(request, body.snapshot_id, of=key.run_id)).snapshot_id
    wish = Wish(
        body.template or row.template, body.ttl_s, to_json(body.metadata).decode(), snapshot_id, *once
    )
    try:
        made = await unless_gone(request, sandbox_use.create(found, key.owner, wish))
    except SandfleetError:
        await _forget(request, taken)
        raise
    if made.begins_with != snapshot_id:  # a copy of this request has made it, from a snapshot of its own
        await _forget(request, taken)
    return created_response(made)


async def _forget(request: Request, taken: UUID | None) -> None:
    """Keep no snapshot that nobody has asked for and nothing begins with."""
    if taken is not None:
        async with resources(request).pool.connection() as connection:
            await snapshots.forget(connection, caller(request), taken)


@router.post("/sandboxes/{sandbox_id}/restore", openapi_extra=body_of(RestoreSandbox))
async def restore(request: Request, sandbox_id: str) -> Response:
    """Begin this sandbox anew with a snapshot: what runs in it is killed, its files are replaced."""
    key = sandbox_key(request, sandbox_id)
    body = await read(request, RestoreSandbox)
    snapshot = await _snapshot(request, body.snapshot_id)
    row = await unless_gone(request, sandbox_use.restore(resources(request), key, snapshot))
    return json_response(sandbox_view(row))


@router.get("/threads/{thread_id}/runs/{run_id}/snapshots")
async def of_run_on_thread(request: Request, thread_id: str, run_id: str) -> Response:
    """Snapshots of the sandbox of a run, newest first. Query: limit, offset."""
    return await _of_run(request, run_id, parse_id(thread_id, "thread_id"))


@router.get("/runs/{run_id}/snapshots")
async def of_run(request: Request, run_id: str) -> Response:
    """The same, by the run's id alone."""
    return await _of_run(request, run_id, None)


async def _of_run(request: Request, run_id: str, thread_id: UUID | None) -> Response:
    run = parse_id(run_id, "run_id")
    await runs.get(resources(request).pool, caller(request), thread_id, run)
    return (await _page(request, run))[0]


@router.get("/snapshots")
async def list_snapshots(request: Request) -> Response:
    """All snapshots of the caller's, newest first. Query: limit, offset."""
    return (await _page(request, None))[0]


@router.get("/snapshots/{snapshot_id}")
async def get(request: Request, snapshot_id: str) -> Response:
    """One snapshot."""
    return json_response(_view(await _snapshot(request, parse_id(snapshot_id, "snapshot_id"))))


@router.delete("/snapshots/{snapshot_id}")
async def delete(request: Request, snapshot_id: str) -> Response:
    """Keep a snapshot no longer."""
    snapshot = await _snapshot(request, parse_id(snapshot_id, "snapshot_id"))
    async with resources(request).pool.connection() as connection:
        await snapshots.forget(connection, caller(request), snapshot.snapshot_id)
    return no_content()


async def _take(request: Request, sandbox_id: str) -> UUID:
    use = use_of(request, sandbox_id)
    asked = Ask("POST", "/sandbox/snapshot", json={"reason": "request"})
    return UUID((await unless_gone(request, use.json(asked)))["snapshot_id"])


async def _snapshot(request: Request, snapshot_id: UUID, of: UUID | None = None) -> Snapshot:
    async with resources(request).pool.connection() as connection:
        found = await snapshots.get(connection, caller(request), snapshot_id)
    if found is None or of not in (None, found.run_id):
        raise NotFound(sandbox_use.NO_SNAPSHOT)
    return found


async def _page(request: Request, of: UUID | None) -> tuple[Response, bool]:
    query_only(request, "limit", "offset")
    limit = query_int(request, "limit", 10, 1, 1000)
    offset = query_int(request, "offset", 0, 0, 2**31 - 1)
    async with resources(request).pool.connection() as connection:
        rows = await snapshots.page(connection, caller(request), of, limit + 1, offset)
    shown = [_view(row) for row in rows[:limit]]
    return json_response(shown, headers=page_headers(offset, limit, len(rows))), bool(rows)


def _view(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "snapshot_id": snapshot.snapshot_id,
        "of": snapshot.run_id,
        "thread_id": snapshot.thread_id,
        "reason": snapshot.reason,
        "bytes": snapshot.bytes,
        "files": snapshot.files,
        "content_bytes": snapshot.content_bytes,
        "skipped": snapshot.skipped,
        "created_at": utc(snapshot.created_at),
    }
