"""A request to a sandbox host, apart from the HTTP client that sends it."""

from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_ANSWER_S = 120.0


class Once:
    """A body that is sent while it comes from somewhere else. Once it has ``begun`` it cannot be sent again."""

    def __init__(self, pieces: AsyncIterable[bytes]) -> None:
        self._pieces = pieces
        self.begun = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        self.begun = True
        return aiter(self._pieces)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked. ``silence_s``: how long the host may say nothing before it is given up."""

    method: str
    path: str
    params: Mapping[str, str | int] = field(default_factory=dict)
    json: Any = None
    content: bytes | Once | None = None
    silence_s: float = _ANSWER_S

    @property
    def repeatable(self) -> bool:
        """Whether it can be sent again as it was."""
        return not (isinstance(self.content, Once) and self.content.begun)
