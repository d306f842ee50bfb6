"""How exceptions become answers: one handler per kind, always ``{"detail": "<string>", "code": …}``."""

import logging
import re

import psycopg
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from psycopg_pool import PoolTimeout
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sandfleet.functions.api.responses import error_response, json_response
from sandfleet.shared.errors import BodyTooLarge, InvalidRequest, NotOffered, SandfleetError, Unavailable

_log = logging.getLogger(__name__)
_SHOWN = 3  # problems of one body that are named


_CHOICE = re.compile(r"[\[({]|^(str|int|float|bool|[A-Z][a-z]+(Body|Size))$")
"""Parts of a problem's place that name one of several types that a field may have, and no field."""


def invalid(error: ValidationError | RequestValidationError) -> InvalidRequest:
    """The 422 for a schema violation. It names the fields and never repeats their values.

    A field that may be of several types is named once, with all that it may be.
    """
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"] if not _CHOICE.search(str(part)))
        message = re.sub(r" or instance of \w+", "", problem["msg"].removeprefix("Value error, "))
        if problem["type"] == "extra_forbidden":
            message = "there is no such field"
        problems.setdefault(place or "body", []).append(message.replace("valid dictionary", "valid object"))
    named = [
        f"{place}: {messages[0]}"
        + "".join(f", or {m.removeprefix('Input should be ')}" for m in messages[1:])
        for place, messages in list(problems.items())[:_SHOWN]
    ]
    if len(problems) > _SHOWN:
        named.append(f"and {len(problems) - _SHOWN} more")
    return InvalidRequest("; ".join(named))


async def _ours(_: Request, error: Exception) -> Response:
    assert isinstance(error, SandfleetError)
    if error.status >= 500:
        _log.warning("%s: %s", error.code, error.message)
    # The rest of a body that is too large is not read: the connection cannot be used again.
    return error_response(error, {"connection": "close"} if isinstance(error, BodyTooLarge) else None)


async def _schema(_: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError | RequestValidationError)
    return error_response(invalid(error))


_OFFERED = (
    "Offered are assistants, threads, runs, sandboxes, snapshots and usage: /openapi.json has all routes."
)
_NOT_OFFERED = (
    (
        re.compile(r"/store(/|$)"),
        "The store (client.store) is not offered; a graph may bring one of its own.",
    ),
    (
        re.compile(r"/crons(/|$)"),
        "Crons (client.crons) are not offered; a scheduler of yours may create runs.",
    ),
    (
        re.compile(r"/threads/[^/]+/(stream|commands)(/|$)"),
        "Streams of threads (client.threads.stream, join_stream) are not offered; each run has one.",
    ),
)
"""Parts of the SDK without a route here, by their paths, and what to do instead."""


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        for path, why in _NOT_OFFERED:
            if path.search(request.url.path):
                return error_response(NotOffered(f"{why} {_OFFERED}"))
    if error.status_code == 404:
        return error_response(NotOffered(f"There is no such route. {_OFFERED}"))
    detail, code = str(error.detail), "http_error"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "others")
        detail, code = f"This path does not take {request.method}, only {allowed}.", "method_not_allowed"
    return json_response({"detail": detail, "code": code}, error.status_code, error.headers)


DATABASE_AWAY = (psycopg.OperationalError, PoolTimeout)
"""What is raised while PostgreSQL cannot be reached or refuses to work."""


def database_away(error: Exception) -> Response:
    """The answer to a request that met one of `DATABASE_AWAY`."""
    _log.warning("database does not answer: %s", type(error).__name__)
    return error_response(
        Unavailable("The database does not answer. Try again in a moment.", retry_after_s=1)
    )


async def _database_away(_: Request, error: Exception) -> Response:
    return database_away(error)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _unexpected(_: Request, error: Exception) -> Response:
    return json_response({"detail": "Internal error.", "code": "internal"}, 500)


def install(app: FastAPI) -> None:
    """Register all handlers."""
    app.add_exception_handler(SandfleetError, _ours)
    app.add_exception_handler(ValidationError, _schema)
    app.add_exception_handler(RequestValidationError, _schema)
    app.add_exception_handler(HTTPException, _http)
    for kind in DATABASE_AWAY:
        app.add_exception_handler(kind, _database_away)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
