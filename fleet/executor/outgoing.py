"""Where a run's HTTP requests leave, in the clients that model libraries use: httpx, and httpx2 beside it.

Each names the span that it is a part of, by the header ``traceparent``; and those of a model call are counted by their
status, every retry by itself, which a model's own callbacks never see.
"""

import importlib
from contextvars import ContextVar
from typing import Any

from sandfleet.fleet.executor import metrics, run_spans
from sandfleet.fleet.executor.watch_calls import CallWatch
from sandfleet.fleet.tools import running_call

current_watch: ContextVar[CallWatch | None] = ContextVar("sandfleet_call_watch", default=None)
"""The model calls of the run that the current task works for; set by the executor."""

_HEADER = "traceparent"
_MARK = "_sandfleet_sends"


def install() -> None:
    """From now on the requests of runs are seen; others are as they were. May be repeated."""
    for name in ("httpx", "httpx2"):
        try:
            library = importlib.import_module(name)
        except ImportError:
            continue
        for client, seen in ((library.AsyncClient, _seen_async), (library.Client, _seen_sync)):
            if not hasattr(client.send, _MARK):
                client.send = seen(client.send)


def _seen_async(send: Any) -> Any:
    async def seen(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_model_call(request):
            return await send(self, request, *args, **kwargs)
        try:
            response = await send(self, request, *args, **kwargs)
        except Exception:
            metrics.model_response(None)
            raise
        metrics.model_response(response.status_code)
        return response

    setattr(seen, _MARK, True)
    return seen


def _seen_sync(send: Any) -> Any:
    def seen(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_model_call(request):
            return send(self, request, *args, **kwargs)
        try:
            response = send(self, request, *args, **kwargs)
        except Exception:
            metrics.model_response(None)
            raise
        metrics.model_response(response.status_code)
        return response

    setattr(seen, _MARK, True)
    return seen


def _is_model_call(request: Any) -> bool:
    """Mark a run's request; whether it belongs to a model call."""
    watch = current_watch.get()
    if watch is None:
        return False
    parent = run_spans.traceparent()
    if parent is not None and _HEADER not in request.headers:
        request.headers[_HEADER] = parent
    return watch.under_way and running_call.get(None) is None
