"""Logs of a Lambda: all of its loggers in powertools' JSON form, by the rules of `sandfleet.shared.logs`."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from aws_lambda_powertools import Logger
from aws_lambda_powertools.logging.formatter import LambdaPowertoolsFormatter

from sandfleet.shared import logs
from sandfleet.shared.settings import Settings

T = TypeVar("T")


class _WithoutContent(LambdaPowertoolsFormatter):
    def format(self, record: logging.LogRecord) -> str:
        kept = copy.copy(record)
        kept.msg, kept.args = logs.message_of(record) if isinstance(record.msg, str) else record.msg, ()
        vars(kept).update(logs.ids_of(record))
        if record.exc_info and record.exc_info[1] is not None:
            vars(kept)["exception"] = logs.described(record.exc_info[1])
        kept.exc_info = kept.exc_text = kept.stack_info = None
        return super().format(kept)


def lambda_logger(service: str, settings: Settings) -> Logger:
    """The logger of a function; what all other modules log goes the same way."""
    logger = Logger(service=service, level=settings.log_level, logger_formatter=_WithoutContent())
    logging.getLogger(service).propagate = False
    root = logging.getLogger()
    root.handlers = logger.handlers
    root.setLevel(logging.WARNING)
    logging.getLogger("sandfleet").setLevel(settings.log_level)
    return logger


class FunctionFailed(Exception):
    """A function failed; its log says why. The runtime prints this one, messages of others might hold content."""


def failing_without_content(
    logger: Logger,
) -> Callable[[Callable[[dict[str, Any], Any], T]], Callable[[dict[str, Any], Any], T]]:
    """Decorate a handler so that what it raises is logged by our rules, and the runtime learns its type only."""

    def decorate(handler: Callable[[dict[str, Any], Any], T]) -> Callable[[dict[str, Any], Any], T]:
        @functools.wraps(handler)
        def handled(event: dict[str, Any], context: Any) -> T:
            try:
                return handler(event, context)
            except Exception as error:
                logger.error("the function failed", exc_info=error)
                failed = FunctionFailed(type(error).__name__)
            raise failed

        return handled

    return decorate
