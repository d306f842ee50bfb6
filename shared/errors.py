"""The one exception hierarchy. Every error has a stable code, an HTTP status and a message that says what to do."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class SandfleetError(Exception):
    """Base of all errors of sandfleet itself; a graph's own exceptions never derive from it.

    ``code`` is stable and meant for programs, ``status`` is the HTTP status that the API answers with, and the
    message tells the user what to do.
    """

    code = "internal"
    status = 500
    extra: Mapping[str, Any] = MappingProxyType({})
    """More fields of the API's answer."""

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(SandfleetError):
    """The request can never succeed as it stands; the message names the field."""

    code = "invalid_request"
    status = 422


class BadRequest(SandfleetError):
    """Well-formed, but contradictory or beyond a structural limit, as the LangGraph dialect answers with 400."""

    code = "bad_request"
    status = 400


class BodyTooLarge(SandfleetError):
    """The body is larger than the configured limit."""

    code = "body_too_large"
    status = 413


class Unauthenticated(SandfleetError):
    """No key, or one that is unknown or revoked."""

    code = "unauthenticated"
    status = 401


class Forbidden(SandfleetError):
    """The key is good, but it may not do this."""

    code = "forbidden"
    status = 403


class NotFound(SandfleetError):
    """Nothing with this id belongs to the caller. A foreign id answers the same as a missing one."""

    code = "not_found"
    status = 404


class NotOffered(NotFound):
    """There is no such route. The message says what is offered instead."""

    code = "not_offered"


class Conflict(SandfleetError):
    """The object exists already, or is in a state that excludes this operation."""

    code = "conflict"
    status = 409


class TooManyRequests(SandfleetError):
    """A limit of the tenant is reached; ``retry_after_s`` says when to try again."""

    code = "too_many_requests"
    status = 429


class Unavailable(SandfleetError):
    """A part that this operation needs does not answer; nothing was changed."""

    code = "unavailable"
    status = 503


class Superseded(SandfleetError):
    """This executor's lease on the run is over: another attempt, or the end of the run, came first."""

    code = "superseded"
    status = 409


class InvalidSettings(SandfleetError):
    """The environment has a value that no process of ours can work with; the message names the variable."""

    code = "invalid_settings"
    status = 500


class GraphLoadError(SandfleetError):
    """A graph of ``langgraph.json`` cannot be loaded; the message names the graph and the reason."""

    code = "graph_load_error"
    status = 500


class SandboxError(SandfleetError):
    """A sandbox operation failed; the message is fit to be shown to the model."""

    code = "sandbox_error"
    status = 502


class HostUnavailable(SandboxError):
    """No sandbox host answers, or it cannot do this now."""

    code = "sandbox_host_unavailable"
    status = 503


class HostAway(HostUnavailable):
    """Nobody listens at the host's address: what was asked was not sent."""


class HostBroke(HostUnavailable):
    """The host went away in the middle: what was asked may have been done."""


class NoRoom(HostUnavailable):
    """The host is full, or all are."""

    code = "no_room"


class ScalingFailed(SandfleetError):
    """A pool's executors could not be counted or asked for; the message names the target."""

    code = "scaling_failed"
