"""What a tool raised, in a form that can be kept and raised again by a replay. No code of the exception runs for it."""

import sys
from contextlib import suppress
from typing import Any

from langchain_core.tools import ToolException

_MAX_ARGUMENT = 10_000
_PLAIN = (str, int, float, bool, type(None))


class ReplayedError(ToolException):
    """Stands for an exception of a type that cannot be made again from what was kept."""


def describe(error: BaseException) -> dict[str, Any]:
    """The type of an exception by name, and its arguments; other than plain ones are replaced by its text."""
    kind = type(error)
    args = [a[:_MAX_ARGUMENT] if isinstance(a, str) else a for a in error.args]
    if not all(isinstance(a, _PLAIN) for a in args):
        args = [str(error)[:_MAX_ARGUMENT]]
    return {"module": kind.__module__, "name": kind.__qualname__, "args": args}


def rebuild(kept: dict[str, Any]) -> Exception:
    """An exception like the one that was described: of the same type if this process has loaded it already.

    Neither an import nor the type's own constructor runs.
    """
    found: Any = sys.modules.get(kept["module"])
    for part in kept["name"].split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with suppress(Exception):
            made = found.__new__(found, *kept["args"])
            made.args = tuple(kept["args"])
            str(made)
            return made
    return ReplayedError(f"{kept['name']}: {', '.join(map(str, kept['args']))}")
