"""What handlers read from a request: who asks, the resources of the process, and a bounded, validated JSON body."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from sandfleet.functions.api.errors import invalid
from sandfleet.functions.api.resources import Resources
from sandfleet.shared.errors import BodyTooLarge, InvalidRequest
from sandfleet.shared.ids import Owner
from sandfleet.shared.json_text import parse_json

_DISCARDED_BYTES = 1024 * 1024
_DISCARDING_S = 1.0
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


def caller(request: Request) -> Owner:
    """Who asks; the authentication has put it there."""
    owner: Owner = request.scope["state"]["owner"]
    return owner


def resources(request: Request) -> Resources:
    """The connections and tasks of this process."""
    found: Resources = request.app.state.resources
    return found


async def read_body(request: Request) -> bytes:
    """The whole body. Raises BodyTooLarge while reading, whether or not the length was announced."""
    limit = resources(request).settings.max_body_bytes
    announced = request.headers.get("content-length", "")
    stream = request.stream()
    if announced.isdigit() and int(announced) > limit:
        await discard(stream)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in stream:
        size += len(chunk)
        if size > limit:
            await discard(stream)
            raise _too_large(limit)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def discard(stream: AsyncIterator[bytes]) -> None:
    """Read on for a while before a refusal: a connection that is closed with unread bytes is reset, and takes the refusal
    with it."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARDING_S):
            async for chunk in stream:
                size += len(chunk)
                if size > _DISCARDED_BYTES:
                    return


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit} bytes. Send less, or store large data elsewhere.")


def idempotency(request: Request, body: bytes) -> tuple[str | None, bytes | None]:
    """The Idempotency-Key of a request, and the hash of what the key stands for: path and body."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None, None
    if not _IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key: use 1 to 255 visible ASCII characters")
    digest = hashlib.sha256(request.url.path.encode())
    digest.update(b"\0")
    digest.update(body)
    return key, digest.digest()


def parse(request: Request, body: bytes) -> Any:
    """The JSON value of a body; an empty body is an empty object."""
    return parse_json(body or b"{}", resources(request).settings.max_json_depth)


def validate(model: type[M], value: Any) -> M:
    """The value as a model. Raises InvalidRequest that names the fields that are wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


async def read(request: Request, model: type[M]) -> M:
    """The body as a model."""
    return validate(model, parse(request, await read_body(request)))


def parse_id(text: str, name: str) -> UUID:
    """A UUID of the path or the query. Raises InvalidRequest that names it."""
    try:
        return UUID(text)
    except ValueError:
        raise InvalidRequest(f"{name}: not a UUID") from None


def query_only(request: Request, *names: str) -> None:
    """Refuse a query with anything but ``names``: a misspelt ``append`` would replace what it was to be added to.

    Raises InvalidRequest that names one and says what there is.
    """
    if unknown := sorted(request.query_params.keys() - set(names)):
        known = f"it takes {', '.join(names)}" if names else "it takes none"
        raise InvalidRequest(f"{unknown[0][:64]!r} is no query parameter of this request: {known}")


def query_bool(request: Request, name: str) -> bool:
    """A boolean of the query, absent or empty meaning false."""
    text = request.query_params.get(name, "").lower()
    if text in ("", "0", "false"):
        return False
    if text in ("1", "true"):
        return True
    raise InvalidRequest(f"{name}: use true or false")


def query_int(request: Request, name: str, default: int, low: int, high: int) -> int:
    """An integer of the query within bounds."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        number = int(text) if len(text) < 20 else high + 1  # 64 bits are enough
    except ValueError:
        raise InvalidRequest(f"{name}: not an integer") from None
    if not low <= number <= high:
        raise InvalidRequest(f"{name}: must be {low} to {high}")
    return number


def query_list(request: Request, name: str) -> list[str]:
    """All values of a repeated query parameter, empty ones left out."""
    return [value for value in request.query_params.getlist(name) if value]


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do something for as long as the client waits for it. Raises ClientDisconnect. The body must have been read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        leaving.cancel()
        while not doing.done():  # a library below may swallow a cancellation
            doing.cancel()
            await asyncio.wait((doing,), timeout=1.0)
        if not doing.cancelled():
            doing.exception()
