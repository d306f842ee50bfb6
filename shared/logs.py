"""Structured logs: one JSON object a line on stderr, with ids and never with content.

Content comes from two sides that nobody reviews: exceptions, whose messages quote what they stumbled over, and libraries,
whose messages do. So an exception is logged as its types and places, without messages; and a library's message only if it
is one whose words we know, or as the template that it was made of. What a project's own code logs is its author's, and
stands as it is.
"""

import logging
import sys
import sysconfig
import threading
import traceback
import warnings
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TextIO

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_TRUSTED = ("sandfleet", "uvicorn", "opentelemetry", "mangum")
"""Loggers whose messages hold no content."""

_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAMES = 20
_CAUSES = 5
_WITHHELD = "(withheld: a library's message may hold content)"

about: ContextVar[dict[str, str] | None] = ContextVar("sandfleet_about", default=None)
"""Ids that stand on each line which the current task or thread logs: ``run_id``, ``tenant`` and the like."""


def described(error: BaseException) -> list[dict[str, Any]]:
    """An exception and what caused it, newest first: ``type``, for some a ``code``, and ``at``, the places it came
    through, innermost last. No messages, no values, no source lines."""
    found: list[dict[str, Any]] = []
    seen: BaseException | None = error
    while seen is not None and len(found) < _CAUSES:
        kind = type(seen)
        one: dict[str, Any] = {
            "type": kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}"
        }
        code = getattr(seen, "code", None) or getattr(seen, "sqlstate", None)
        if isinstance(code, str) and kind.__module__.startswith(("sandfleet.", "psycopg")):
            one["code"] = code
        one["at"] = _places(seen.__traceback__)
        found.append(one)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return found


def _places(trace: TracebackType | None) -> list[str]:
    frames = [
        f"{_short(frame.f_code.co_filename)}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(trace)
    ]
    return frames[-_FRAMES:]


def _short(path: str) -> str:
    for folder in _LIBRARIES:
        if path.startswith(folder):
            return path[len(folder) + 1 :]
    return path


def message_of(record: logging.LogRecord) -> str:
    """What a record may say."""
    name = record.name
    first = name.partition(".")[0]
    if first in _TRUSTED or not (record.pathname.startswith(_LIBRARIES) or _is_library(first)):
        return record.getMessage()
    if name == "asyncio":  # it appends the objects concerned, line by line
        return str(record.msg).partition("\n")[0]
    return str(record.msg) if record.args else _WITHHELD


def _is_library(name: str) -> bool:
    """Whether a module of this name is installed. What is compiled, as uvloop is, logs in the name of its caller's file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(_LIBRARIES)


def ids_of(record: logging.LogRecord) -> dict[str, object]:
    """The ids that stand on a record: those of the task at work, and over them the record's own extra fields."""
    found: dict[str, object] = dict(about.get() or {})
    found.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
    return found


class _JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        message = message_of(record)
        entry: dict[str, object] = {
            "level": record.levelname,
            "time": self.formatTime(record),
            "process": self._process_name,
            "logger": record.name,
            "message": message,
        }
        if message is _WITHHELD:
            entry["at"] = f"{_short(record.pathname)}:{record.lineno}"
        entry.update(ids_of(record))
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = described(record.exc_info[1])
        return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode(errors="replace")


def configure(process_name: str, level: str = "INFO") -> None:
    """Send all logs of this process to stderr as JSON lines; ``process_name`` stands on each.

    Extra fields (``extra={"run_id": …}``) become keys of the object. What would end in a traceback on stderr (an exception
    that nobody catches, in a thread too) and warnings are logged as well, by the same rules.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process_name))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in (
        "botocore",
        "aiobotocore",
        "httpx",
        "httpcore",
        "httpx2",
        "httpcore2",
        "openai",
        "urllib3",
        "uvicorn.access",
    ):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    catch_the_rest()


def catch_the_rest() -> None:
    """Log what Python would print to stderr on its own."""
    log = logging.getLogger("sandfleet.uncaught")

    def uncaught(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        if not issubclass(kind, (KeyboardInterrupt, SystemExit)):
            log.critical("uncaught exception", exc_info=error)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            log.error("uncaught exception in a thread", exc_info=args.exc_value)

    def unraisable(args: "sys.UnraisableHookArgs") -> None:
        log.error("exception that could not be raised", exc_info=args.exc_value)

    def warned(  # noqa: PLR0917
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        log.warning("warning", extra={"category": category.__name__, "at": f"{_short(filename)}:{lineno}"})

    sys.excepthook = uncaught
    threading.excepthook = in_thread
    sys.unraisablehook = unraisable
    warnings.showwarning = warned
