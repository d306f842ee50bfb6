"""Logs of a Lambda: ours and powertools' in one JSON form, with the request's id."""

import logging

from aws_lambda_powertools import Logger

from sandfleet.shared.settings import Settings


def lambda_logger(service: str, settings: Settings) -> Logger:
    """The logger of a function; what our modules log goes the same way."""
    logger = Logger(service=service, level=settings.log_level)
    ours = logging.getLogger("sandfleet")
    ours.handlers, ours.propagate = logger.handlers, False
    ours.setLevel(settings.log_level)
    return logger
