"""Tells watchers of runs that were ended by another than their executor: the cancel of a pending run, the sweep, a stuck graph.

Without it they learn by their comparison with PostgreSQL, once a second.
"""

import asyncio
import logging
from collections.abc import Sequence

from redis.asyncio import Redis

from sandfleet.shared.settings import Settings
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.streams.append import Appender, Entry
from sandfleet.shared.streams.entry import EventId, encode

_log = logging.getLogger(__name__)
_TIMEOUT_S = 1.0


async def announce_ends(redis: "Redis", settings: Settings, ended: Sequence[EndedRun]) -> None:
    """Append the last events of runs, which are committed, to their streams. Takes 1 s at most and never fails.

    Nothing follows a terminal attempt, so its entry may make the stream, however late it comes.
    """
    if not ended:
        return
    appender = Appender(redis, ttl_s=settings.stream_ttl_s, max_entries=settings.stream_max_entries)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await appender.append([_entry(run) for run in ended])
    except Exception as error:
        _log.warning("ends of runs not announced: %s", type(error).__name__)


def _entry(run: EndedRun) -> Entry:
    events = [(0, "error", run.error.encode())] if run.error is not None else []
    events.append((len(events), "end", b"null"))
    return Entry(run.run_id, EventId(run.attempt, len(events) - 1), encode(events), create=True)
