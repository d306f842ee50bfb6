"""The thread that runs the graphs, on an event loop of its own.

A graph that blocks this loop delays only its neighbours here: leases, cancels and signals belong to the control loop.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import uvloop
from redis.asyncio import Redis

from sandfleet.fleet.executor import intercept_tools, outgoing, sync_durability, whole_steps
from sandfleet.fleet.executor.execution import Ended, Execution, Services, Stop
from sandfleet.fleet.executor.fenced_rows import UsageRow
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks
from sandfleet.fleet.executor.loop_watch import LoopWatch
from sandfleet.fleet.executor.metrics import ExecutorMetrics
from sandfleet.fleet.executor.node_tasks import cancel_until_ended
from sandfleet.fleet.executor.placement import Placement
from sandfleet.fleet.executor.publisher import Publisher
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import ClaimedRun
from sandfleet.shared.templates import Templates

_log = logging.getLogger(__name__)

OnEnded = Callable[[Fence, Ended], None]


class GraphThread:
    """Runs graphs. Its methods are called from the control loop's thread; ``on_ended`` is called on the graphs' thread."""

    def __init__(
        self, settings: Settings, graphs: dict[str, Graph], templates: Templates, on_ended: OnEnded
    ) -> None:
        self._settings = settings
        self._templates = templates
        self._graphs = graphs
        self._on_ended = on_ended
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="graphs", daemon=True)
        self.watch = LoopWatch(self._loop, self._thread)
        """How late the graphs' loop is; for the control loop."""
        self._stopping = False
        self._executions: dict[Fence, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.metrics = ExecutorMetrics(settings, graphs)
        self._redis: Redis
        self._services: Services

    def start(self) -> None:
        """Start the thread and open what the runs share. Raises what opening raised."""
        intercept_tools.install()
        outgoing.install()
        sync_durability.install()
        whole_steps.install()
        self._thread.start()
        self._call(self._open()).result()

    def run(self, claimed: ClaimedRun, lease: Lease) -> None:
        """Begin to execute a claimed run."""
        self._loop.call_soon_threadsafe(self._begin, claimed, lease)

    def stop(self, fence: Fence, reason: Stop) -> None:
        """Break a run off; nothing happens when it has ended already."""
        self._loop.call_soon_threadsafe(self._break_off, fence, reason)

    def works_on(self, fence: Fence) -> bool:
        """Whether an attempt's coroutine has been begun and not ended."""
        return fence in self._executions

    def usage_of(self, fence: Fence) -> list[UsageRow]:
        """What an attempt whose coroutine has not ended has used of models so far."""
        execution = self._executions.get(fence)
        return [] if execution is None else execution.usage.rows()

    def close(self, timeout_s: float) -> bool:
        """Close what was opened and end the thread; false when a graph blocks it for more than ``timeout_s``, or does not
        end within that time."""
        self._stopping = True
        if self._thread.ident is None:
            self._loop.close()
            return True
        closing = self._call(self._close(timeout_s / 2))
        try:
            closing.result(timeout_s)
        except TimeoutError:
            closing.cancel()
            return False
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, coroutine: object) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)  # type: ignore[arg-type]

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopping:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A node called sys.exit(): asyncio ends the loop for it. It is that run's error and nobody else's.
                _log.warning("a graph raised SystemExit")

    async def _open(self) -> None:
        settings = self._settings
        pool = open_pool(settings.database_url, settings.executor_pool_size, name="sandfleet-executor")
        await pool.open()
        writer = FencedWriter(settings.database_url)
        await writer.start()
        self._redis = Redis.from_url(settings.redis_url)
        publisher = Publisher(writer, self._redis, pool, settings)
        await publisher.start()
        self._services = Services(
            settings,
            self._graphs,
            pool,
            Finisher(pool),
            writer,
            publisher,
            Placement(settings, pool, self._templates),
            LedgerLinks(settings.database_url, writer, pool),
            self._templates,
            self.metrics,
            asyncio.Lock(),
        )

    async def _close(self, patience_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        await self._services.ledger_links.aclose()
        await self._services.publisher.aclose()
        await self._services.writer.stop()
        await self._redis.aclose()
        await self._services.placement.aclose()
        await self._services.pool.close()

    def _begin(self, claimed: ClaimedRun, lease: Lease) -> None:
        if lease.superseded:  # given back while a graph held the loop
            self._on_ended(claimed.fence, Ended({}))
            return
        lease.begun = True
        execution = Execution(claimed, lease, self._services)
        self._executions[claimed.fence] = execution
        task = self._loop.create_task(self._execute(execution))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, execution: Execution) -> None:
        fence = execution.run.fence
        ended = Ended({})  # after a fault of ours the lease runs out: that counts, and a successor takes over
        try:
            ended = await execution.execute()
        except (Exception, asyncio.CancelledError):
            about = {"run_id": str(fence.key.run_id), "tenant": fence.key.tenant}
            _log.exception("executing a run failed", extra=about)
        try:
            if execution.stopped:
                await cancel_until_ended(fence)
        finally:
            del self._executions[fence]
            self._on_ended(fence, ended)

    def _break_off(self, fence: Fence, reason: Stop) -> None:
        execution = self._executions.get(fence)
        if execution is not None:
            execution.stop(reason)
