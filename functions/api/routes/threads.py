"""Threads: made, found, changed, copied and removed."""

from typing import Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.cancelling import tell
from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.extract import Path, extract, parse_path
from sandfleet.functions.api.fields import Body, Id, Limit, Metadata, Offset, refuse
from sandfleet.functions.api.requests import caller, parse_id, read, resources
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.responses import fragment, json_response, no_content, page_headers, utc
from sandfleet.shared.errors import BadRequest, InvalidRequest, NotFound
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import threads
from sandfleet.shared.store.thread_values import complete
from sandfleet.shared.store.threads import Filter, Thread

router = APIRouter(tags=["threads"])

SELECTABLE = (
    "thread_id",
    "created_at",
    "updated_at",
    "state_updated_at",
    "metadata",
    "config",
    "status",
    "values",
    "interrupts",
    "error",
)
_MOST_PATHS = 10  # of one search's extract, as the SDK documents

_REFUSED_AT_CREATION = {
    "ttl": "delete the thread when it is not needed any more",
    "supersteps": "update the state of the new thread step by step",
}
_REFUSED_AT_UPDATE = {"ttl": _REFUSED_AT_CREATION["ttl"]}


class CreateBody(Body):
    """A new thread."""

    thread_id: Id = Field(default_factory=new_id)
    metadata: Metadata = Field(default_factory=dict)
    if_exists: Literal["raise", "do_nothing"] = "raise"

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return refuse(value, _REFUSED_AT_CREATION)


class UpdateBody(Body):
    """Metadata to lay over the thread's."""

    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return refuse(value, _REFUSED_AT_UPDATE)


class CountBody(Body):
    """Which threads: all filters must match."""

    metadata: Metadata = Field(default_factory=dict)
    values: Metadata = Field(default_factory=dict)
    status: Literal["idle", "busy", "interrupted", "error"] = Field("idle")
    ids: list[str] = Field(default_factory=list)

    def filter(self) -> Filter:
        """The filter in the store's terms. Raises BadRequest for an id that is none, as the dialect does."""
        try:
            ids = [parse_id(text, "ids") for text in self.ids]
        except InvalidRequest as error:
            raise BadRequest(error.message) from None
        return Filter(
            metadata=to_json(self.metadata).decode() if self.metadata else None,
            values={key: to_json(value).decode() for key, value in self.values.items()},
            status=self.status if "status" in self.model_fields_set else None,
            ids=ids or None,
        )


class SearchBody(CountBody):
    """Which threads, how many, in what order, and what of them."""

    limit: Limit = 10
    offset: Offset = 0
    sort_by: Literal["thread_id", "status", "created_at", "updated_at", "state_updated_at"] = "created_at"
    sort_order: Literal["asc", "desc"] = "desc"
    select: list[str] = Field(default_factory=list)
    extract: dict[str, str] = Field(default_factory=dict, max_length=_MOST_PATHS)

    @model_validator(mode="after")
    def _known_fields(self) -> "SearchBody":
        for name in self.select:
            if name not in SELECTABLE:
                raise ValueError(f"select: {name!r} is no field of a thread")
        return self


class PruneBody(Body):
    """Threads to remove."""

    thread_ids: list[Id] = Field(max_length=1000)
    strategy: Literal["delete"] = "delete"


@router.post("/threads", openapi_extra=body_of(CreateBody))
async def create(request: Request) -> Response:
    """Make a thread."""
    body = await read(request, CreateBody)
    found, owner = resources(request), caller(request)
    thread = await threads.create(
        found.pool,
        owner,
        body.thread_id,
        metadata=to_json(body.metadata).decode(),
        return_existing=body.if_exists == "do_nothing",
    )
    return json_response((await _views(found, owner, [thread]))[0])


@router.post("/threads/search", openapi_extra=body_of(SearchBody))
async def search(request: Request) -> Response:
    """Threads that match all filters, newest first unless asked otherwise."""
    body = await read(request, SearchBody)
    paths = {alias: parse_path(text) for alias, text in body.extract.items()}
    found, owner = resources(request), caller(request)
    read_values = any(path[0] == "values" for path in paths.values())
    rows = await threads.search(
        found.pool,
        owner,
        body.filter(),
        sort_by=body.sort_by,
        descending=body.sort_order == "desc",
        limit=body.limit + 1,
        offset=body.offset,
        with_values=not body.select or "values" in body.select or read_values,
    )
    views = await _views(found, owner, rows[: body.limit])
    return json_response(
        [_selected(view, body.select, paths) for view in views],
        headers=page_headers(body.offset, body.limit, len(rows)),
    )


@router.post("/threads/count", openapi_extra=body_of(CountBody))
async def count(request: Request) -> Response:
    """How many threads match all filters."""
    body = await read(request, CountBody)
    return json_response(await threads.count(resources(request).pool, caller(request), body.filter()))


@router.post("/threads/prune", openapi_extra=body_of(PruneBody))
async def prune(request: Request) -> Response:
    """Remove several threads; those that are not there are not counted."""
    body = await read(request, PruneBody)
    pruned = 0
    for thread_id in body.thread_ids:
        try:
            await remove(resources(request), caller(request), thread_id)
        except NotFound:
            continue
        pruned += 1
    return json_response({"pruned_count": pruned})


@router.get("/threads/{thread_id}")
async def get(request: Request, thread_id: str) -> Response:
    """One thread, with the values of its newest state."""
    if request.query_params.get("include"):
        raise InvalidRequest("include: threads have no ttl here; leave it out")
    return json_response(await _view_of(request, thread_id))


@router.patch("/threads/{thread_id}", openapi_extra=body_of(UpdateBody))
async def update(request: Request, thread_id: str) -> Response:
    """Lay metadata over the thread's. ``Prefer: return=minimal`` answers 204."""
    thread = parse_id(thread_id, "thread_id")
    body = await read(request, UpdateBody)
    await threads.merge_metadata(
        resources(request).pool, caller(request), thread, to_json(body.metadata).decode()
    )
    if "return=minimal" in request.headers.get("prefer", "").replace(" ", "").lower():
        return Response(status_code=204, headers={"preference-applied": "return=minimal"})
    return json_response(await _view_of(request, thread_id))


@router.delete("/threads/{thread_id}")
async def delete(request: Request, thread_id: str) -> Response:
    """Remove a thread with all its runs and states; runs that are not over end."""
    await remove(resources(request), caller(request), parse_id(thread_id, "thread_id"))
    return no_content()


@router.post("/threads/{thread_id}/copy")
async def copy(request: Request, thread_id: str) -> Response:
    """Copy a thread's states, without its runs; checkpoints keep their ids."""
    new = new_id()
    await threads.copy(resources(request).pool, caller(request), parse_id(thread_id, "thread_id"), new)
    return json_response(await _view_of(request, str(new)))


async def remove(found: Resources, owner: Owner, thread_id: Any) -> None:
    """Remove a thread, and tell the executors that work on it. Raises NotFound."""
    tell(found, await threads.delete(found.pool, owner, thread_id))


async def _view_of(request: Request, thread_id: str) -> dict[str, Any]:
    found, owner = resources(request), caller(request)
    thread = await threads.get(found.pool, owner, parse_id(thread_id, "thread_id"))
    return (await _views(found, owner, [thread]))[0]


async def _views(found: Resources, owner: Owner, rows: list[Thread]) -> list[dict[str, Any]]:
    if any(row.refs not in (None, "{}") for row in rows):
        async with found.pool.connection() as connection:
            values = await complete(connection, owner, [(r.thread_id, r.values, r.refs) for r in rows])
    else:
        values = [row.values for row in rows]
    return [_view(row, whole) for row, whole in zip(rows, values, strict=True)]


def _view(thread: Thread, values: str | None) -> dict[str, Any]:
    return {
        "thread_id": thread.thread_id,
        "created_at": utc(thread.created_at),
        "updated_at": utc(thread.updated_at),
        "state_updated_at": utc(thread.state_updated_at),
        "metadata": fragment(thread.metadata),
        "status": thread.status,
        "config": fragment(thread.config),
        "values": fragment(values),
        "interrupts": fragment(thread.interrupts),
        "error": fragment(thread.error),
    }


def _selected(view: dict[str, Any], select: list[str], paths: dict[str, Path]) -> dict[str, Any]:
    shown = {name: view[name] for name in select} if select else view
    if paths:
        document = orjson.loads(orjson.dumps(view))
        shown = {**shown, "extracted": {alias: extract(document, path) for alias, path in paths.items()}}
    return shown
