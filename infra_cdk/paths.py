"""The API's paths that a Lambda would have to buffer, since they stream, wait or carry files: they go to the gateway.

A test holds this list against the routes of the application, and against what their code does.
"""

from typing import Final

STAGE_PREFIX: Final = "/v1"
"""The stage in the URL. A private integration puts it before the path that the gateway gets."""
TO_GATEWAY: Final[tuple[tuple[str, str], ...]] = (
    ("POST", "/runs/stream"),
    ("POST", "/runs/wait"),
    ("GET", "/runs/{run_id}/stream"),
    ("POST", "/threads/{thread_id}/runs/stream"),
    ("POST", "/threads/{thread_id}/runs/wait"),
    ("GET", "/threads/{thread_id}/runs/{run_id}/stream"),
    ("GET", "/threads/{thread_id}/runs/{run_id}/join"),
    # With ?wait=true it answers after the run's end.
    ("POST", "/threads/{thread_id}/runs/{run_id}/cancel"),
    # All of them: most wait for a host, for longer than a Lambda may, and bodies are files of any size.
    ("ANY", "/sandboxes"),
    ("ANY", "/sandboxes/{proxy+}"),
)
"""(method, path) in API Gateway's words."""
