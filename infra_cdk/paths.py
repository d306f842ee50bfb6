"""The API's paths that stream or wait, which a Lambda would have to buffer: they go to the gateway.

A test holds this list against the routes of the application.
"""

from typing import Final

STREAMING: Final[tuple[tuple[str, str], ...]] = (
    ("POST", "/runs/stream"),
    ("POST", "/runs/wait"),
    ("GET", "/runs/{run_id}/stream"),
    ("POST", "/threads/{thread_id}/runs/stream"),
    ("POST", "/threads/{thread_id}/runs/wait"),
    ("GET", "/threads/{thread_id}/runs/{run_id}/stream"),
    ("GET", "/threads/{thread_id}/runs/{run_id}/join"),
    # With ?wait=true it answers after the run's end.
    ("POST", "/threads/{thread_id}/runs/{run_id}/cancel"),
)
