"""The HTTP API as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sandfleet import __version__
from sandfleet.functions.api import docs, errors
from sandfleet.functions.api.auth import Authentication
from sandfleet.functions.api.prefix import WithoutPrefix
from sandfleet.functions.api.request_context import RequestContext
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.routes import (
    assistants,
    runs,
    sandbox_commands,
    sandbox_files,
    sandbox_processes,
    sandbox_snapshots,
    sandboxes,
    stateless_runs,
    system,
    thread_state,
    threads,
    usage,
)
from sandfleet.shared.settings import Settings

_EXPOSED = ("location", "content-location", "x-pagination-total", "x-pagination-next", "retry-after")


class Opening:
    """ASGI middleware for servers without a lifespan: opens the resources at the first request, and leaves nothing to
    do in the background behind a response that was buffered."""

    def __init__(self, app: ASGIApp, resources: Resources) -> None:
        self._app = app
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._resources.open()
        await self._app(scope, receive, send)
        if self._resources.buffered:
            await self._resources.settle()


def create_app(settings: Settings, *, buffered: bool = False) -> FastAPI:
    """The API with all its routes. ``app.state.resources`` are its connections.

    ``buffered`` is for a Lambda: see `Resources`.
    """
    resources = Resources(settings, buffered=buffered)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await resources.open()
        try:
            yield
        finally:
            await resources.aclose()

    app = FastAPI(
        title="sandfleet",
        version=__version__,
        description="Durable LangGraph runs, in the dialect of the LangGraph SDK.",
        lifespan=lifespan,
        redoc_url=None,
    )
    app.state.resources = resources
    # Routes are tried in this order: those of runs, which cost the most requests, come first.
    for module in (
        runs,
        stateless_runs,
        threads,
        thread_state,
        assistants,
        sandboxes,
        sandbox_commands,
        sandbox_files,
        sandbox_processes,
        sandbox_snapshots,
        usage,
        system,
    ):
        app.include_router(module.router)
    errors.install(app)
    docs.install(app)
    # The last one added sees a request first.
    app.add_middleware(Authentication, resources=resources)
    app.add_middleware(Opening, resources=resources)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
    )
    app.add_middleware(RequestContext)
    if settings.api_prefix:
        app.add_middleware(WithoutPrefix, prefix=settings.api_prefix)
    return app
