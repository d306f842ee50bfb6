"""Serving a process's metrics to Prometheus, at an address of their own that only the inside reaches."""

import logging
from collections.abc import Iterable

_log = logging.getLogger(__name__)

OTHER = "other"


def serve(listen: str) -> None:
    """Serve ``/metrics`` at ``ADDRESS:PORT`` until the process ends; an empty ``listen`` does nothing.

    A thread of its own answers, so that a scrape waits for no event loop and holds none up. An address that cannot be used
    is logged and costs nothing else: a process that cannot be watched still works.
    """
    if not listen:
        return
    # Imported here: a Lambda has neither this library nor anybody who could scrape it.
    from prometheus_client import start_http_server

    address, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), addr=address or "0.0.0.0")
    except OSError as error:
        _log.error("metrics are not served: %s", error.strerror, extra={"address": listen})
    else:
        _log.info("metrics are served", extra={"address": listen})


class BoundedLabel:
    """Values of a label that come from outside: the first ``limit`` of them stand for themselves, all later ones for
    ``other``, so that no caller can make a process keep more than so many series."""

    def __init__(self, limit: int, known: Iterable[str] = ()) -> None:
        self._limit = limit
        self._known = set(known)

    def of(self, value: str) -> str:
        """The label for a value. From any thread: two that come at once may both be let in."""
        if value in self._known:
            return value
        if len(self._known) < self._limit:
            self._known.add(value)
            return value
        return OTHER
