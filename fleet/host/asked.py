"""What the routes of the host's API have in common: whose sandbox is meant, and checked parameters."""

import time
from typing import Annotated

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.shared.errors import InvalidRequest
from sandfleet.shared.ids import Fence
from sandfleet.shared.sandbox_token import SandboxTokenExpired

FENCE: web.RequestKey[Fence] = web.RequestKey("fence", Fence)
GOOD_UNTIL: web.RequestKey[float] = web.RequestKey("good_until", float)
"""When the request's token expires, on the monotonic clock."""

Argument = Annotated[str, StringConstraints(max_length=128 * 1024)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class Body(BaseModel):
    """A JSON body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class TerminalSize(Body):
    """Rows and columns of a terminal."""

    rows: int = Field(24, ge=1, le=1000)
    columns: int = Field(80, ge=1, le=1000)


def fence_of(request: web.Request) -> Fence:
    """The attempt that the request's token speaks for, now that the request is whole. SandboxTokenExpired if that took too
    long: it may be asked again, since nothing was done."""
    if time.monotonic() >= request[GOOD_UNTIL]:
        raise SandboxTokenExpired("The sandbox token expired while the request came: sign a new one.")
    return request[FENCE]


def sandbox_of(registry: Registry, request: web.Request) -> tuple[Sandbox, Fence]:
    """The sandbox that the request's token speaks for, and for which attempt. Raises as `Registry.find` and `fence_of`."""
    fence = fence_of(request)
    return registry.find(fence), fence


def path(request: web.Request) -> str:
    """The parameter ``path``."""
    value = request.query.get("path", "")
    if not value or "\0" in value or len(value) > 4096:
        raise InvalidRequest("path: it must have 1 to 4096 characters and no NUL")
    return value


def integer(request: web.Request, name: str, default: int, most: int) -> int:
    """An integer parameter from 0 to ``most``."""
    return _integer(name, request.query.get(name), default, most)


def part(request: web.Request, name: str, most: int = 2**53) -> int:
    """An integer part of the path."""
    return _integer(name, request.match_info[name], 0, most)


def flag(request: web.Request, name: str) -> bool:
    """A parameter that is 1, or is 0 or missing."""
    return bool(integer(request, name, 0, 1))


def _integer(name: str, text: str | None, default: int, most: int) -> int:
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 20 or int(text) > most:
        raise InvalidRequest(f"{name}: it must be an integer from 0 to {most}")
    return int(text)
