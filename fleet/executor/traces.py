"""Sending off what LangSmith's tracer has gathered, before the process ends."""

import asyncio
import logging
import threading

from langchain_core.tracers.langchain import wait_for_all_tracers

_log = logging.getLogger(__name__)


async def flush(timeout_s: float) -> None:
    """Wait for traces that are on their way, for ``timeout_s`` at most. At once when nothing is traced.

    The tracer waits without a limit for a server that does not answer, so it does that on a thread that may be left.
    """
    thread = threading.Thread(target=wait_for_all_tracers, name="traces", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, timeout_s)
    if thread.is_alive():
        _log.warning("some traces were not sent in time")
