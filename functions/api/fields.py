"""Field types of request bodies: strict, and only what the store can keep."""

from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Body(BaseModel):
    """A request body or a part of one: no coercion, unknown keys ignored, null refused where a field does not name it."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ExactBody(Body):
    """One of a dialect of our own: an unknown key is refused, since whoever sends it means something by it."""

    model_config = ConfigDict(extra="forbid")


def _storable_text(text: str) -> str:
    if "\x00" in text:
        raise ValueError("U+0000 cannot be stored here; remove it")
    return text


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    """PostgreSQL's jsonb and text hold no U+0000, neither in keys nor in values."""
    rest: list[Any] = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            _storable_text(part)
        elif isinstance(part, Mapping):
            rest.extend(part)
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)
    return value


def _uuid(value: Any) -> UUID:
    if not isinstance(value, str):
        raise ValueError("not a UUID")
    try:
        return UUID(value)
    except ValueError:
        raise ValueError("not a UUID") from None


Text = Annotated[str, AfterValidator(_storable_text)]
"""Text that goes into a text column."""

Id = Annotated[UUID, BeforeValidator(_uuid)]

JsonObject = dict[str, Any]
"""An object that is kept as JSON text, so that any character survives."""

Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
"""An object that is searched by containment."""

Limit = Annotated[int, Field(ge=1, le=1000)]
Offset = Annotated[int, Field(ge=0, le=2**31 - 1)]


def refuse(value: Any, names: Mapping[str, str]) -> Any:
    """Raise ValueError when a body holds one of ``names``: known to the dialect, but not honoured here.

    The values of ``names`` say what to do instead.
    """
    if isinstance(value, dict):
        for name, advice in names.items():
            if name in value:
                raise ValueError(f"{name} is not supported here; {advice}")
    return value
