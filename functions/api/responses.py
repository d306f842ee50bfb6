"""Answers: JSON by orjson, and errors as the SDK reads them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.responses import Response

from sandfleet.shared.errors import SandfleetError


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a JSON value; `orjson.Fragment` embeds text that is JSON already."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_response(error: SandfleetError, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with an error, a sentence for people and a code for programs, and with ``Retry-After`` where the error says
    when to try again."""
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(error.retry_after_s)
    return json_response(
        {"detail": error.message, "code": error.code, **error.extra}, error.status, all_headers
    )


def no_content() -> Response:
    """204: done, nothing to say."""
    return Response(status_code=204)


def fragment(text: str | None) -> orjson.Fragment | None:
    """A JSON text from the store, to be embedded as it is; None for null."""
    return None if text is None else orjson.Fragment(text)


def utc(time: datetime | None) -> datetime | None:
    """The time with ``+00:00``, whatever the database session's zone is."""
    return None if time is None else time.astimezone(UTC)


def page_headers(offset: int, limit: int, found: int) -> dict[str, str]:
    """Pagination of a search that asked for one row more than its ``limit`` and got ``found``.

    ``X-Pagination-Next`` is there while more follow; the total is a lower bound, counting would read every row.
    """
    more = found > limit
    headers = {"x-pagination-total": str(offset + min(found, limit) + more)}
    if more:
        headers["x-pagination-next"] = str(offset + limit)
    return headers
