"""The API as a Lambda behind API Gateway (REST and HTTP APIs).

A Lambda answers when a response is complete, so streams and waits are windows: a stream ends without ``end`` and its
client comes back with the last id, a wait answers 503 with ``Location``.
"""

from typing import Any

from mangum import Mangum

from sandfleet.functions.api.app import create_app
from sandfleet.functions.api.prefix import without_prefix
from sandfleet.functions.lambda_logs import failing_without_content, lambda_logger
from sandfleet.shared.db import logins
from sandfleet.shared.settings import settings

WINDOW_S = 20.0
"""Longest response unless ``SANDFLEET_RESPONSE_WINDOW_S`` is set: an API Gateway gives up after 29 s."""

_configured = settings()
logger = lambda_logger("sandfleet-api", _configured)

_window_s = _configured.response_window_s or WINDOW_S
_app = create_app(_configured.model_copy(update={"response_window_s": _window_s}), buffered=True)
# One event loop for the life of the process, and connections that open with the first request and stay.
_adapter = Mangum(_app, lifespan="off")


@logger.inject_lambda_context(clear_state=True)
@failing_without_content(logger)
def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Entry point of the function."""
    logins.refresh(_configured)
    answer: dict[str, Any] = _adapter(_without_stage(event), context)
    return answer


def _without_stage(event: dict[str, Any]) -> dict[str, Any]:
    """An HTTP API puts the name of its stage in front of the path, except for the default stage."""
    context = event.get("requestContext", {})
    http = context.get("http")
    if http is None:
        return event
    path = without_prefix(http["path"], f"/{context.get('stage')}")
    return {**event, "rawPath": path, "requestContext": {**context, "http": {**http, "path": path}}}
