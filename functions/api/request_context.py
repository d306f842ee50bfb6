"""What belongs to a request from its first moment: the ids on its log lines, and its span, which runs go on from."""

import os
import re
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sandfleet.shared import logs, tracing

_IDS = re.compile(r"/(thread|run)s/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.ASCII | re.IGNORECASE)
_UNTRACED = frozenset({"/ok", "/system/ready"})  # asked every few seconds by whoever watches
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_XRAY = re.compile(r"Root=1-([0-9a-f]{8})-([0-9a-f]{24});Parent=([0-9a-f]{16});Sampled=([01])")

_given: ContextVar[str | None] = ContextVar("sandfleet_given_traceparent", default=None)


class RequestContext:
    """ASGI middleware, outside of all that logs. The span of a stream lasts until its end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        logs.about.set({f"{kind.lower()}_id": value for kind, value in _IDS.findall(path)})
        header = next((value for name, value in scope["headers"] if name == b"traceparent"), None)
        given = tracing.parse(None if header is None else header.decode("latin-1"))
        _given.set(given)
        if not tracing.on() or path in _UNTRACED:
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        with tracing.span(method, {"http.request.method": method}, parent=given, kind="server") as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = getattr(scope.get("route"), "path", None)
                    if route is not None:
                        span.rename(f"{method} {route}")
                        span.set("http.route", route)
                    for name, value in (logs.about.get() or {}).items():
                        span.set(f"sandfleet.{name}", value)
                    span.set("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.failed(str(message["status"]))
                await send(message)

            await self._app(scope, receive, noted)


def note(**ids: str) -> None:
    """Add ids to the request's log lines and span."""
    logs.about.set({**(logs.about.get() or {}), **ids})


def traceparent() -> str | None:
    """What a run names as its parent: the request's span, else what the caller named, else the Lambda's X-Ray segment."""
    return tracing.current_traceparent() or _given.get() or _xray(os.environ.get("_X_AMZN_TRACE_ID"))


def _xray(header: str | None) -> str | None:
    found = _XRAY.search(header or "")
    if found is None:
        return None
    time, unique, parent, sampled = found.groups()
    return tracing.parse(f"00-{time}{unique}-{parent}-0{sampled}")
