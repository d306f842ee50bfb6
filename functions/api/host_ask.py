"""A request to a sandbox host, apart from the HTTP client that sends it."""

from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked. ``silence_s``: how long the host may say nothing before it is given up."""

    method: str
    path: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Any = None
    content: AsyncIterable[bytes] | None = None
    silence_s: float = _ANSWER_S
