"""Sandboxes without a run: made, found and removed."""

from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api import sandbox_use
from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import ExactBody, Id, Limit, Metadata, Offset, Text
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
from sandfleet.functions.api.responses import fragment, json_response, no_content, page_headers, utc
from sandfleet.functions.api.sandbox_use import Use
from sandfleet.shared.errors import InvalidRequest, NotFound
from sandfleet.shared.ids import RunKey
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import sandboxes
from sandfleet.shared.store.sandboxes import Sandbox, Wish

router = APIRouter(tags=["sandboxes"])


class CreateSandbox(ExactBody):
    """A new sandbox."""

    template: Text = Field("default", min_length=1, max_length=63)
    ttl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """When it ends; an hour, or the template's lifetime if that is less."""
    metadata: Metadata = Field(default_factory=dict)
    snapshot_id: Id | None = None
    """Whose files it begins with: of a sandbox or of a run."""


class ChangeSandbox(ExactBody):
    """What of a sandbox can be changed."""

    ttl_s: float = Field(gt=0, allow_inf_nan=False)
    """It ends so many seconds from now, in place of when it was to end."""


class SearchSandboxes(ExactBody):
    """Which sandboxes: all filters must match."""

    metadata: Metadata = Field(default_factory=dict)
    template: Text | None = None
    limit: Limit = 10
    offset: Offset = 0


def sandbox_key(request: Request, sandbox_id: str) -> RunKey:
    """The full key of the sandbox that a path names."""
    return RunKey(*caller(request), parse_id(sandbox_id, "sandbox_id"))


def use_of(request: Request, sandbox_id: str) -> Use:
    """This request's use of a sandbox, in the generation that its caller knows, if it says so."""
    generation = request.headers.get("x-sandbox-generation", "")
    if generation and not (generation.isascii() and generation.isdigit() and len(generation) < 10):
        raise InvalidRequest("X-Sandbox-Generation: not a number")
    key = sandbox_key(request, sandbox_id)
    return Use(resources(request), key, int(generation) if generation else None)


@router.post("/sandboxes", status_code=201, openapi_extra=body_of(CreateSandbox))
async def create(request: Request) -> Response:
    """Make a sandbox, and answer when commands can run in it. A request that is sent again with its Idempotency-Key is answered
    with the sandbox that it has made."""
    raw = await read_body(request)
    body = validate(CreateSandbox, parse(request, raw))
    metadata = to_json(body.metadata).decode()
    wish = Wish(body.template, body.ttl_s, metadata, body.snapshot_id, *idempotency(request, raw))
    made = await unless_gone(request, sandbox_use.create(resources(request), caller(request), wish))
    return created_response(made)


def created_response(made: Sandbox) -> Response:
    """201 with the sandbox, and where it is."""
    return json_response(sandbox_view(made), 201, {"location": f"/sandboxes/{made.sandbox_id}"})


@router.get("/sandboxes")
async def list_sandboxes(request: Request) -> Response:
    """The caller's sandboxes, newest first. Query: limit, offset, template; by metadata with POST /sandboxes/search."""
    if "metadata" in request.query_params:
        raise InvalidRequest("metadata: ask for it in the body of POST /sandboxes/search")
    query_only(request, "limit", "offset", "template")
    return await _page(
        request,
        SearchSandboxes(
            template=request.query_params.get("template") or None,
            limit=query_int(request, "limit", 10, 1, 1000),
            offset=query_int(request, "offset", 0, 0, 2**31 - 1),
        ),
    )


@router.post("/sandboxes/search", openapi_extra=body_of(SearchSandboxes))
async def search(request: Request) -> Response:
    """Sandboxes that match all filters, newest first."""
    return await _page(request, await read(request, SearchSandboxes))


async def _page(request: Request, wanted: SearchSandboxes) -> Response:
    rows = await sandboxes.search(
        resources(request).pool,
        caller(request),
        metadata=to_json(wanted.metadata).decode() if wanted.metadata else None,
        template=wanted.template,
        limit=wanted.limit + 1,
        offset=wanted.offset,
    )
    return json_response(
        [sandbox_view(row) for row in rows[: wanted.limit]],
        headers=page_headers(wanted.offset, wanted.limit, len(rows)),
    )


@router.get("/sandboxes/{sandbox_id}")
async def get(request: Request, sandbox_id: str) -> Response:
    """One sandbox."""
    row = await sandboxes.get(resources(request).pool, sandbox_key(request, sandbox_id))
    if row is None:
        raise NotFound(sandbox_use.MISSING)
    return json_response(sandbox_view(row))


@router.patch("/sandboxes/{sandbox_id}", openapi_extra=body_of(ChangeSandbox))
async def change(request: Request, sandbox_id: str) -> Response:
    """Change when a sandbox ends."""
    body = await read(request, ChangeSandbox)
    row = await sandbox_use.live(resources(request), sandbox_key(request, sandbox_id), body.ttl_s)
    return json_response(sandbox_view(row))


@router.delete("/sandboxes/{sandbox_id}")
async def delete(request: Request, sandbox_id: str) -> Response:
    """End a sandbox; what runs in it is killed."""
    await sandbox_use.delete(resources(request), sandbox_key(request, sandbox_id))
    return no_content()


def sandbox_view(row: Sandbox) -> dict[str, Any]:
    """A sandbox as the API shows it."""
    return {
        "sandbox_id": row.sandbox_id,
        "template": row.template,
        "metadata": fragment(row.metadata),
        "generation": row.generation,
        "lost": row.lost,
        "snapshot_id": row.begins_with,
        "restored": row.restored,
        "created_at": utc(row.created_at),
        "expires_at": utc(row.expires_at),
    }
