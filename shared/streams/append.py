"""Appends entries of many runs to their Redis streams in one round trip.

Redis refuses an id that is not above the stream's last, so a superseded attempt cannot write behind its successor. That
fence is lost with the key; therefore a missing key is only made by an entry whose attempt is known to be the current one.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, cast
from uuid import UUID

from redis.asyncio import Redis

from sandfleet.shared.streams.entry import FIELD, EventId, stream_key

# Entries per call: Redis serves nobody else while a script runs, and 64 entries take it well under a millisecond.
_PER_CALL = 64

# KEYS: streams. ARGV: ttl in s, entries kept, then (id, '1' if the key may be made, payload) per stream.
_SCRIPT = f"""
local results = {{}}
for i = 1, #KEYS do
  local id, create, payload = ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  local reply
  if create == '1' then
    reply = redis.pcall('XADD', KEYS[i], 'MAXLEN', '~', ARGV[2], id, '{FIELD}', payload)
  else
    reply = redis.pcall('XADD', KEYS[i], 'NOMKSTREAM', 'MAXLEN', '~', ARGV[2], id, '{FIELD}', payload)
  end
  if not reply then
    results[i] = 1
  elseif type(reply) == 'table' and reply.err then
    results[i] = 4
    if string.find(reply.err, 'equal or smaller', 1, true) then
      local info = redis.call('XINFO', 'STREAM', KEYS[i])
      for j = 1, #info, 2 do
        if info[j] == 'last-generated-id' then
          local top = string.match(info[j + 1], '^%d+')
          results[i] = top == string.match(id, '^%d+') and 2 or 3
        end
      end
    end
  else
    results[i] = 0
  end
  if results[i] ~= 1 then
    redis.call('EXPIRE', KEYS[i], ARGV[1])
  end
end
return results
"""


class Outcome(IntEnum):
    """What became of an entry."""

    OK = 0
    MISSING = 1
    """There is no stream, and the entry may not make it."""
    PRESENT = 2
    """The entry, or a later one of the same attempt, is there already: the reply to an earlier call was lost."""
    SUPERSEDED = 3
    """A later attempt has written to the stream."""
    REFUSED = 4
    """Redis refuses it for a reason of its own, such as being out of memory."""


class Entry(NamedTuple):
    """One flush of one run. ``last`` is the id of its last event, ``payload`` comes from ``entry.encode``.

    ``create`` allows to make the stream: for an attempt's first entry, or when PostgreSQL has just confirmed that the
    attempt is the current one.
    """

    run_id: UUID
    last: EventId
    payload: bytes
    create: bool


class Appender:
    """Appends entries. Streams are trimmed to about ``max_entries`` and live for ``ttl_s`` after their last entry."""

    def __init__(self, redis: Redis, *, ttl_s: int, max_entries: int) -> None:
        # The script is called by its SHA and loaded when Redis does not know it, as after a restart.
        self._script = redis.register_script(_SCRIPT)
        self._head = (ttl_s, max_entries)

    async def append(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Append in order; one outcome per entry. Entries must be of different runs.

        Raises redis.RedisError, OSError or TimeoutError when Redis does not answer; then any part may have been
        appended, and calling again is safe.
        """
        outcomes: list[Outcome] = []
        for at in range(0, len(entries), _PER_CALL):
            chunk = entries[at : at + _PER_CALL]
            args: list[bytes | str | int] = [*self._head]
            for entry in chunk:
                args += (str(entry.last), "1" if entry.create else "0", entry.payload)
            reply = await self._script(keys=[stream_key(entry.run_id) for entry in chunk], args=args)
            outcomes += map(Outcome, cast("list[int]", reply))
        return outcomes
