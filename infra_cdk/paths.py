"""The API's paths that a Lambda would have to buffer, since they stream, wait or carry files, or whose answers may be larger than
the 6 MB that a Lambda may answer: they go to the gateway.

A test holds this list against the routes of the application, and against what their code does.
"""

from typing import Final

STAGE_PREFIX: Final = "/v1"
"""The stage in the URL. A private integration puts it before the path that the gateway gets."""
LARGE: Final[tuple[tuple[str, str], ...]] = (
    ("GET", "/threads/{thread_id}/state"),
    ("GET", "/threads/{thread_id}/state/{checkpoint_id}"),
    ("POST", "/threads/{thread_id}/state/checkpoint"),
    ("GET", "/threads/{thread_id}/history"),
    ("POST", "/threads/{thread_id}/history"),
)
"""The values of a thread, which have no bound of their own, and as many versions of them as were asked for."""
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
    *LARGE,
    # All of them: most wait for a host, for longer than a Lambda may, and bodies are files, of which API Gateway takes 10 MB.
    ("ANY", "/sandboxes"),
    ("ANY", "/sandboxes/{proxy+}"),
)
"""(method, path) in API Gateway's words."""
