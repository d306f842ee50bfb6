"""Paths like ``values.messages[-1].content`` that a search takes out of each thread."""

import re
from typing import Any

from sandfleet.shared.errors import InvalidRequest

Path = tuple[str | int, ...]

_ROOTS = ("values", "metadata", "config", "interrupts", "error")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?[0-9]{1,9})\]", re.ASCII)


def parse_path(text: str) -> Path:
    """The steps of a path: keys, and list positions, negative ones from the end. Raises InvalidRequest."""
    steps: list[str | int] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None:
            break
        key, position = match.groups()
        steps.append(key if position is None else int(position))
        at = match.end()
    if at < len(text) or not steps or steps[0] not in _ROOTS:
        raise InvalidRequest(
            f"extract: {text[:100]!r} is no path; begin with one of {', '.join(_ROOTS)}, then .key or [position]"
        )
    return tuple(steps)


def extract(document: Any, path: Path) -> Any:
    """What lies at the path, None where nothing does."""
    for step in path:
        if isinstance(step, int):
            if not isinstance(document, list) or not -len(document) <= step < len(document):
                return None
            document = document[step]
        elif isinstance(document, dict):
            document = document.get(step)
        else:
            return None
    return document
