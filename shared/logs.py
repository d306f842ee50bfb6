"""Structured logs: one JSON object a line on stderr, with ids and never with content."""

import logging
import sys

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "level": record.levelname,
            "time": self.formatTime(record),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((k, v) for k, v in vars(record).items() if k not in _STANDARD)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode(errors="replace")


def configure(process_name: str, level: str = "INFO") -> None:
    """Send all logs of this process to stderr as JSON lines; ``process_name`` stands on each.

    Extra fields (``extra={"run_id": …}``) become keys of the object.
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
