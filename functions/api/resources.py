"""What one API process holds: connections, the streams' hub, the waker, and its background tasks."""

import asyncio
import logging
from collections.abc import Coroutine
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redis.asyncio import BlockingConnectionPool, Redis

from sandfleet.functions.api.known_assistants import KnownAssistants
from sandfleet.shared.cancel_keys import set_cancel
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.ready import count_ready
from sandfleet.shared.store.submission import Submitter
from sandfleet.shared.streams.hub import Hub
from sandfleet.shared.waker import Waker

if TYPE_CHECKING:
    from sandfleet.functions.api.host_client import HostClient

_log = logging.getLogger(__name__)
_ANSWER_S = 15.0  # a request gives a database up that does not answer, and says so


class Resources:
    """Opened once per event loop: at start under a server, at the first request on a Lambda.

    ``buffered`` says that responses reach the client only when they are complete, as on a Lambda, which is also frozen
    between requests: then nothing may be left to do in the background when a response ends (``settle``).
    """

    def __init__(self, settings: Settings, *, buffered: bool = False) -> None:
        self.settings = settings
        self.buffered = buffered
        # RDS Proxy, which Lambdas connect through, pins sessions that prepare statements; and a Lambda's clock may stand
        # still while it is frozen.
        self.pool = open_pool(
            settings.database_url,
            settings.api_pool_size,
            prepare=not buffered,
            check_after_s=0.0 if buffered else 1.0,
            limit_s=_ANSWER_S,
            name="sandfleet-api",
        )
        self.submitter = Submitter(self.pool)
        self.permits = Permits(settings)
        self.known_assistants = KnownAssistants(self.pool)
        self.closing = asyncio.Event()
        """Set when the process is about to stop: streams close so that their clients come back elsewhere."""
        self._opening = asyncio.Lock()
        self._is_open = False
        self._tasks: set[asyncio.Task[None]] = set()

    @cached_property
    def hosts(self) -> "HostClient":
        """The sandbox hosts; its library is imported when it is first needed."""
        from sandfleet.functions.api.host_client import HostClient

        return HostClient(self.settings)

    async def open(self) -> None:
        """Open everything; later calls do nothing. Servers that do not answer yet are found when they are needed."""
        if self._is_open:
            return
        async with self._opening:
            if self._is_open:
                return
            # No socket_timeout: on Python 3.11 it may swallow a cancellation. Callers limit their calls instead.
            self.redis = Redis.from_pool(
                BlockingConnectionPool.from_url(
                    self.settings.redis_url,
                    max_connections=4,
                    timeout=1.0,
                    socket_connect_timeout=1.0,
                )
            )
            # A Lambda is frozen when it has answered: it cannot see a moment later who took the run.
            self.waker = Waker(self.redis, self.permits, None if self.buffered else self._count_ready)
            self.hub = Hub(self.settings.redis_url, self.pool)
            await self.pool.open()
            self.hub.start()
            self._is_open = True

    async def aclose(self) -> None:
        """Finish what must not be lost and close all connections."""
        if not self._is_open:
            return
        await self.waker.flush()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hub.aclose()
        if "hosts" in vars(self):
            await self.hosts.aclose()
        await self.redis.aclose()
        await self.permits.aclose()
        await self.pool.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside the requests; it is cancelled when the process ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def settle(self) -> None:
        """Wait until nothing is left to do in the background."""
        await self.waker.flush()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _count_ready(self, pool: str, limit: int) -> int:
        async with self.pool.connection() as connection:
            return await count_ready(connection, pool, limit)

    def signal_cancel(self, run_id: UUID, action: str) -> None:
        """Tell the executor of a run that its end was asked for. It may be lost: the request itself is in PostgreSQL."""
        self.spawn(self._signal_cancel(run_id, action))

    async def _signal_cancel(self, run_id: UUID, action: str) -> None:
        try:
            await set_cancel(self.redis, run_id, action)
        except Exception as error:
            _log.warning("cancel not signalled: %s", type(error).__name__)
