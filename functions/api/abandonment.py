"""``on_disconnect=cancel``: a run whose client has gone is cancelled, unless somebody comes back in time.

Whoever watches such a run leaves a mark in Redis, again and again. One that was left looks, after the grace period,
whether the mark is still its own: then nobody has come back, to this process or another. When a process dies with its
clients, nobody looks and the run goes on; so it does when Redis does not answer.
"""

import asyncio
import logging
import uuid

from sandfleet.functions.api.cancelling import cancel_run
from sandfleet.functions.api.resources import Resources
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import RunKey

_log = logging.getLogger(__name__)
_SHORTEST_PAUSE_S = 0.1
_REDIS_LIMIT_S = 1.0


class Watcher:
    """One client that watches a run which must not go on without a client."""

    def __init__(self, resources: Resources, key: RunKey) -> None:
        self._resources = resources
        self._key = key
        self._name = f"sf:watched:{key.run_id}"
        self._mark = uuid.uuid4().hex.encode()
        self._pause_s = max(resources.settings.disconnect_grace_s / 3, _SHORTEST_PAUSE_S)
        self._marking = asyncio.ensure_future(self._keep_marking())

    def left(self) -> None:
        """The client has gone: cancel the run unless somebody watches it after the grace period."""
        self.stop()
        self._resources.spawn(self._cancel_if_alone())

    def stop(self) -> None:
        """Watch no more; the response has ended as it should."""
        self._marking.cancel()

    async def _keep_marking(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_REDIS_LIMIT_S):
                    await self._resources.redis.set(self._name, self._mark, px=int(self._pause_s * 6000))
            except Exception as error:
                _log.warning("watched run not marked: %s", type(error).__name__)
            await asyncio.sleep(self._pause_s)

    async def _cancel_if_alone(self) -> None:
        await asyncio.sleep(self._pause_s * 3)
        try:
            async with asyncio.timeout(_REDIS_LIMIT_S):
                last = await self._resources.redis.get(self._name)
            if last in (None, self._mark):
                await cancel_run(self._resources, self._key, "interrupt")
        except NotFound:
            pass  # it was over before
        except Exception:
            _log.exception("abandoned run not cancelled", extra={"run_id": str(self._key.run_id)})
