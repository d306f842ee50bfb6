"""Sending off what LangSmith's tracer and our own have gathered, before the process ends."""

import asyncio
import logging
import threading
import time

from langchain_core.tracers.langchain import wait_for_all_tracers

from sandfleet.shared import tracing

_log = logging.getLogger(__name__)


async def flush(timeout_s: float) -> None:
    """Wait for traces that are on their way, for ``timeout_s`` at most. At once when nothing is traced.

    A tracer waits long, LangSmith's without a limit, for a server that does not answer, so each does that on a thread
    that may be left.
    """
    threads = [
        threading.Thread(target=wait_for_all_tracers, name="traces", daemon=True),
        threading.Thread(target=tracing.stop, args=(timeout_s,), name="spans", daemon=True),
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        await asyncio.to_thread(thread.join, max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _log.warning("some traces were not sent in time")
