"""Assistants: one per graph from the deployment, and those that callers make of them."""

from typing import Any, Literal
from uuid import UUID

import orjson
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from sandfleet.functions.api.docs import body_of
from sandfleet.functions.api.fields import Body, Id, Limit, Metadata, Offset, Text
from sandfleet.functions.api.requests import caller, parse_id, query_bool, read, resources
from sandfleet.functions.api.responses import fragment, json_response, no_content, page_headers, utc
from sandfleet.functions.api.routes.threads import remove
from sandfleet.functions.api.run_body import AssistantConfig, Configurable
from sandfleet.shared.errors import BadRequest, InvalidRequest, NotFound
from sandfleet.shared.ids import graph_assistant_id, new_id
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import assistants, threads
from sandfleet.shared.store.assistants import Assistant, Filter, Given
from sandfleet.shared.store.graphs import GraphDescription, describe

router = APIRouter(tags=["assistants"])

SELECTABLE = (
    "assistant_id",
    "graph_id",
    "name",
    "description",
    "config",
    "context",
    "created_at",
    "updated_at",
    "metadata",
    "version",
)
_DEEPEST = 100  # xray=true means all levels


class UpdateBody(Body):
    """What to change; what is left out stays."""

    graph_id: Text = Field("", min_length=1)
    config: AssistantConfig = Field(default_factory=AssistantConfig)
    context: Configurable = Field(default_factory=dict)
    metadata: Metadata = Field(default_factory=dict)
    name: Text = ""
    description: Text = ""

    def settings(self) -> tuple[str | None, str | None]:
        """Config and context as JSON texts, None where neither is given. They mirror each other.

        Raises BadRequest when both say something.
        """
        if not {"config", "context"} & self.model_fields_set:
            return None, None
        config = self.config.model_dump(exclude_unset=True)
        configurable = config.get("configurable", {})
        if configurable and self.context:
            raise BadRequest("Give config.configurable or context, not both: they mirror each other.")
        both = configurable or self.context
        if both:
            config["configurable"] = both
        return to_json(config).decode(), to_json(both).decode()

    def given(self) -> Given:
        """What the body says, in the store's terms. Raises BadRequest as `settings` does."""
        config, context = self.settings()

        def said(name: str) -> Any:
            return getattr(self, name) if name in self.model_fields_set else None

        return Given(
            said("graph_id"),
            said("name"),
            said("description"),
            config,
            context,
            to_json(self.metadata).decode(),
        )


class CreateBody(UpdateBody):
    """A new assistant of a deployed graph."""

    graph_id: Text = Field(min_length=1)
    assistant_id: Id = Field(default_factory=new_id)
    if_exists: Literal["raise", "do_nothing"] = "raise"
    name: Text = "Untitled"

    def given(self) -> Given:
        """The same; an assistant without a name is called Untitled."""
        return super().given()._replace(name=self.name)


class CountBody(Body):
    """Which assistants: all filters must match."""

    metadata: Metadata = Field(default_factory=dict)
    graph_id: Text = ""
    name: Text = ""

    def filter(self) -> Filter:
        """The filter in the store's terms."""
        return Filter(
            metadata=to_json(self.metadata).decode() if self.metadata else None,
            graph_id=self.graph_id or None,
            name=self.name or None,
        )


class SearchBody(CountBody):
    """Which assistants, how many, in what order, and what of them."""

    limit: Limit = 10
    offset: Offset = 0
    sort_by: Literal["assistant_id", "graph_id", "name", "created_at", "updated_at"] = "created_at"
    sort_order: Literal["asc", "desc"] = "desc"
    select: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _known_fields(self) -> "SearchBody":
        for name in self.select:
            if name not in SELECTABLE:
                raise ValueError(f"select: {name!r} is no field of an assistant")
        return self


class VersionsBody(Body):
    """Which versions, and how many."""

    metadata: Metadata = Field(default_factory=dict)
    limit: Limit = 10
    offset: Offset = 0


class LatestBody(Body):
    """The version to go back to."""

    version: int = Field(ge=1, le=2**31 - 1)


@router.post("/assistants", openapi_extra=body_of(CreateBody))
async def create(request: Request) -> Response:
    """Make an assistant."""
    body = await read(request, CreateBody)
    made = await assistants.create(
        resources(request).pool,
        caller(request),
        body.assistant_id,
        body.given(),
        return_existing=body.if_exists == "do_nothing",
    )
    return json_response(_view(made))


@router.post("/assistants/search", openapi_extra=body_of(SearchBody))
async def search(request: Request) -> Response:
    """Assistants that match all filters, newest first unless asked otherwise."""
    body = await read(request, SearchBody)
    rows = await assistants.search(
        resources(request).pool,
        caller(request),
        body.filter(),
        sort_by=body.sort_by,
        descending=body.sort_order == "desc",
        limit=body.limit + 1,
        offset=body.offset,
    )
    views = [_view(row) for row in rows[: body.limit]]
    if body.select:
        views = [{name: view[name] for name in body.select} for view in views]
    return json_response(views, headers=page_headers(body.offset, body.limit, len(rows)))


@router.post("/assistants/count", openapi_extra=body_of(CountBody))
async def count(request: Request) -> Response:
    """How many assistants match all filters."""
    body = await read(request, CountBody)
    return json_response(await assistants.count(resources(request).pool, caller(request), body.filter()))


@router.get("/assistants/{assistant_id}")
async def get(request: Request, assistant_id: str) -> Response:
    """One assistant."""
    return json_response(_view(await _stored(request, parse_id(assistant_id, "assistant_id"))))


@router.patch("/assistants/{assistant_id}", openapi_extra=body_of(UpdateBody))
async def update(request: Request, assistant_id: str) -> Response:
    """Make a new version of an assistant."""
    wanted = parse_id(assistant_id, "assistant_id")
    body = await read(request, UpdateBody)
    return json_response(
        _view(await assistants.update(resources(request).pool, caller(request), wanted, body.given()))
    )


@router.delete("/assistants/{assistant_id}")
async def delete(request: Request, assistant_id: str) -> Response:
    """Remove an assistant, and with ``delete_threads=true`` the threads that its runs made or used last."""
    wanted = parse_id(assistant_id, "assistant_id")
    with_threads = query_bool(request, "delete_threads")
    found, owner = resources(request), caller(request)
    await assistants.delete(found.pool, owner, wanted)
    if with_threads:
        for thread_id in await threads.of_assistant(found.pool, owner, wanted):
            try:
                await remove(found, owner, thread_id)
            except NotFound:
                continue
    return no_content()


@router.post("/assistants/{assistant_id}/versions", openapi_extra=body_of(VersionsBody))
async def versions(request: Request, assistant_id: str) -> Response:
    """Versions of an assistant, newest first."""
    wanted = parse_id(assistant_id, "assistant_id")
    body = await read(request, VersionsBody)
    rows = await assistants.versions(
        resources(request).pool,
        caller(request),
        wanted,
        metadata=to_json(body.metadata).decode() if body.metadata else None,
        limit=body.limit,
        offset=body.offset,
    )
    return json_response([_view(row) for row in rows])


@router.post("/assistants/{assistant_id}/latest", openapi_extra=body_of(LatestBody))
async def set_latest(request: Request, assistant_id: str) -> Response:
    """Make an older version the current one."""
    wanted = parse_id(assistant_id, "assistant_id")
    body = await read(request, LatestBody)
    return json_response(
        _view(await assistants.set_latest(resources(request).pool, caller(request), wanted, body.version))
    )


@router.get("/assistants/{assistant_id}/graph")
async def graph(request: Request, assistant_id: str) -> Response:
    """Nodes and edges of the graph. The id may be a graph's name. Query: xray, true or a depth, to open subgraphs."""
    try:
        wanted = UUID(assistant_id)
    except ValueError:
        wanted = graph_assistant_id(assistant_id)
    drawings = orjson.loads((await _described(request, wanted)).drawings)
    depth = _depth(request.query_params.get("xray", ""))
    deepest = max(int(each) for each in drawings)
    return json_response(drawings[str(min(depth, deepest))])


@router.get("/assistants/{assistant_id}/schemas")
async def schemas(request: Request, assistant_id: str) -> Response:
    """JSON schemas of the graph's input, output, state, config and context."""
    described = await _described(request, parse_id(assistant_id, "assistant_id"))
    return json_response({"graph_id": described.graph_id, **orjson.loads(described.schemas)})


def _depth(text: str) -> int:
    if text.lower() in ("", "false"):
        return 0
    if text.lower() == "true":
        return _DEEPEST
    if text.isascii() and text.isdigit() and len(text) < 9:
        return min(int(text), _DEEPEST)
    raise InvalidRequest("xray: use true, false or a depth")


async def _stored(request: Request, assistant_id: UUID) -> Assistant:
    return await assistants.get(resources(request).pool, caller(request), assistant_id)


async def _described(request: Request, assistant_id: UUID) -> GraphDescription:
    assistant = await _stored(request, assistant_id)
    return await describe(resources(request).pool, assistant.graph_id)


def _view(assistant: Assistant) -> dict[str, Any]:
    return {
        "assistant_id": assistant.assistant_id,
        "graph_id": assistant.graph_id,
        "config": fragment(assistant.config),
        "context": fragment(assistant.context),
        "metadata": fragment(assistant.metadata),
        "name": assistant.name,
        "description": assistant.description,
        "version": assistant.version,
        "created_at": utc(assistant.created_at),
        "updated_at": utc(assistant.updated_at),
    }
