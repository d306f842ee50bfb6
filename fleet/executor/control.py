"""The control loop of an executor: claims, leases, cancels, sweep, signals. It never runs a line of a graph."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

import psycopg
from redis.asyncio import Redis

from sandfleet.fleet.executor.execution import Ended, Stop
from sandfleet.fleet.executor.graph_thread import GraphThread
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.permit_keeper import PermitKeeper
from sandfleet.fleet.executor.registration import heartbeat, register_graphs, sign_off
from sandfleet.fleet.executor.session import Session
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.cancel_keys import read_cancels
from sandfleet.shared.ids import Fence
from sandfleet.shared.permits import Permits
from sandfleet.shared.rings import wait_for_ring
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S
from sandfleet.shared.store.claims import ClaimedRun, advance_clock, cancels, claim, hand_over, renew
from sandfleet.shared.store.ready import ready_by_pool
from sandfleet.shared.store.sweep import sweep
from sandfleet.shared.waker import Waker

_log = logging.getLogger(__name__)

_STARVATION_GUARD = 8
"""Every eighth claim takes the class that has waited longest, so that interactive runs never starve batch runs."""

_RING_BLOCK_S = 5
_CANCELS_EVERY_S = 1.0
_HEARTBEAT_EVERY_S = 3.0
_STUCK_AFTER_S = 2.0
"""How long a graph may ignore its cancellation before the control loop ends the run without it."""

_PAUSE_AFTER_ERROR_S = 0.5
_TIMEOUT_ERROR = '{"error": "RunTimeout", "message": "The run exceeded its time limit while its graph blocked the event loop."}'


class _Held:
    """A run that this executor holds a lease on."""

    def __init__(self, run: ClaimedRun, lease: Lease) -> None:
        self.run = run
        self.lease = lease
        self.stop: Stop | None = None
        self.stop_sent = 0.0
        self.started = time.monotonic()


class Executor:
    """One executor process. `run` serves until `drain` has been called and is finished."""

    def __init__(self, settings: Settings, graphs: dict[str, Graph]) -> None:
        self._settings = settings
        self._graphs = graphs
        self._id = f"{settings.pool}-{uuid4().hex[:12]}"
        self._runs: dict[Fence, _Held] = {}
        self._claim_now = asyncio.Event()
        self._claims = 0
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._slot_free = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._redis = Redis.from_url(settings.redis_url)
        self._ring_redis = Redis.from_url(settings.redis_url, socket_timeout=_RING_BLOCK_S + 5)
        self._permits = Permits(settings)
        self._waker = Waker(self._redis, self._permits)
        self._keeper = PermitKeeper(
            self._permits,
            settings.pool,
            slots=settings.slots,
            long_poll_s=settings.long_poll_s,
            visibility_s=settings.visibility_timeout_s,
            busy=lambda: len(self._runs),
            on_poll=self._claim_now.set,
        )
        self._leases = Session(settings.database_url, "sandfleet-leases")
        self._chores = Session(settings.database_url, "sandfleet-sweep")
        self._thread = GraphThread(settings, graphs, self._on_ended)
        self._background: set[asyncio.Task[None]] = set()

    def drain(self) -> None:
        """Stop claiming, let runs finish within the grace period, hand the rest over. Called by the signal handler."""
        self._draining.set()

    async def run(self) -> None:
        """Serve until drained. Returns when every run has ended here or was handed over."""
        async with self._chores.connection() as connection:
            await register_graphs(connection, self._settings.pool, self._graphs)
        await asyncio.to_thread(self._thread.start)
        claiming: list[Callable[[], Awaitable[None]]] = [self._claim_forever, self._listen_for_rings]
        duties: list[Callable[[], Awaitable[None]]] = [
            self._every(self._settings.renew_every_s, self._renew),
            self._every(self._settings.cancel_poll_ms / 1000, self._poll_cancel_keys),
            self._every(_CANCELS_EVERY_S, self._poll_cancels),
            self._every(self._settings.sweep_every_s, self._sweep),
            self._every(_HEARTBEAT_EVERY_S, self._heartbeat),
        ]
        if self._permits.has_queue(self._settings.pool):
            claiming.append(self._keeper.receive)
            duties.append(self._keeper.extend)
        self._claim_now.set()
        async with _running(duties):
            async with _running(claiming):
                await self._draining.wait()
            await self._drain()
        await self._close()

    # --- claiming ----------------------------------------------------------------------------------------------

    async def _claim_forever(self) -> None:
        while True:
            await self._claim_now.wait()
            self._claim_now.clear()
            try:
                while (free := self._settings.slots - len(self._runs)) > 0 and await self._claim(free):
                    pass
            except psycopg.Error as error:
                _log.warning("claiming failed: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                self._claim_now.set()
            self._settle_permits()

    async def _claim(self, free: int) -> bool:
        """Claim once; true if there may be more to claim."""
        settings = self._settings
        self._claims += 1
        longest = self._claims % _STARVATION_GUARD == 0
        sent = time.monotonic()
        async with self._leases.connection() as connection:
            claimed = await claim(
                connection, settings.pool, self._id, settings.lease_s, free, longest_waiting=longest
            )
        for run in claimed:
            held = _Held(run, Lease(sent + settings.lease_s))
            self._runs[run.fence] = held
            self._idle.clear()
            self._thread.run(run, held.lease)
        if claimed:
            async with self._leases.connection() as connection:
                await advance_clock(connection, settings.pool, claimed)
        return len(claimed) == (1 if longest else free)

    async def _listen_for_rings(self) -> None:
        """Block on the pool's ring while a slot is free."""
        while True:
            while len(self._runs) >= self._settings.slots:
                self._slot_free.clear()
                await self._slot_free.wait()
            try:
                if await wait_for_ring(self._ring_redis, self._settings.pool, _RING_BLOCK_S):
                    self._claim_now.set()
            except Exception as error:
                _log.warning("listening for rings failed: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def _settle_permits(self) -> None:
        self._spawn(self._keeper.settle())

    # --- leases and cancels ------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        fences = list(self._runs)
        if not fences:
            return
        sent = time.monotonic()
        async with self._leases.connection() as connection:
            renewal = await renew(connection, fences, self._settings.lease_s)
        for fence in fences:
            held = self._runs.get(fence)
            if held is None:
                continue
            if fence in renewal.held:
                held.lease.deadline = sent + self._settings.lease_s
                if action := renewal.held[fence]:
                    self._stop(held, Stop(action))
            else:
                held.lease.superseded = True
                self._stop(held, Stop.SUPERSEDED)

    async def _poll_cancel_keys(self) -> None:
        if self._runs:
            for fence, action in (await read_cancels(self._redis, list(self._runs))).items():
                if held := self._runs.get(fence):
                    self._stop(held, Stop(action))
        await self._end_stuck()

    async def _poll_cancels(self) -> None:
        if self._runs:
            async with self._leases.connection() as connection:
                found = await cancels(connection, list(self._runs))
            for fence, action in found.items():
                if held := self._runs.get(fence):
                    self._stop(held, Stop(action))

    def _stop(self, held: _Held, reason: Stop) -> None:
        if held.stop is None or (reason is Stop.SUPERSEDED and held.stop is not Stop.SUPERSEDED):
            held.stop = reason
            held.stop_sent = time.monotonic()
            self._thread.stop(held.run.fence, reason)

    async def _end_stuck(self) -> None:
        """End runs whose graph does not come back after a cancel or its timeout. The stuck coroutine is fenced from
        here on and keeps its slot until it ends."""
        now = time.monotonic()
        for held in list(self._runs.values()):
            cancelled = held.stop in (Stop.INTERRUPT, Stop.ROLLBACK) and now > held.stop_sent + _STUCK_AFTER_S
            overdue = now > held.started + held.run.remaining_s + _STUCK_AFTER_S
            if held.lease.superseded or not (cancelled or overdue):
                continue
            held.lease.superseded = True
            status, error = ("interrupted", None) if cancelled else ("timeout", _TIMEOUT_ERROR)
            key = held.run.fence.key
            async with self._chores.connection() as connection:
                cursor = await connection.execute(
                    "select ready_pool, ready_count from end_run(%s, %s, %s, %s, %s::json, %s)",
                    (*key, status, error, TEMPORARY_KEEP_S),
                )
                self._waker.wake_all(ready_by_pool(await cursor.fetchall()))
                if held.stop is Stop.ROLLBACK:
                    await connection.execute("select erase_run(%s, %s, %s)", key)

    # --- chores ------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        settings = self._settings
        async with self._chores.connection() as connection:
            ready = await sweep(
                connection, settings.poison_limit, settings.lease_s, settings.idempotency_ttl_s
            )
        self._waker.wake_all(ready)

    async def _heartbeat(self) -> None:
        async with self._chores.connection() as connection:
            await heartbeat(connection, self._id, self._settings.pool, self._settings.slots, len(self._runs))

    def _every(self, pause_s: float, work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """A loop that does ``work`` now and after every pause; what fails is tried again at the next."""

        async def loop() -> None:
            while True:
                try:
                    await work()
                except Exception as error:
                    _log.warning("%s failed: %s", work.__name__, type(error).__name__)
                await asyncio.sleep(pause_s)

        return loop

    # --- the ends of runs --------------------------------------------------------------------------------------

    def _on_ended(self, fence: Fence, ended: Ended) -> None:
        """Called on the graphs' thread."""
        self._loop.call_soon_threadsafe(self._ended, fence, ended)

    def _ended(self, fence: Fence, ended: Ended) -> None:
        if ended.hand_over:
            self._spawn(self._hand_over([fence]))
        self._waker.wake_all(ended.ready)
        self._runs.pop(fence, None)
        self._slot_free.set()
        if not self._runs:
            self._idle.set()
        if not self._draining.is_set():
            self._claim_now.set()
        self._settle_permits()

    async def _hand_over(self, fences: list[Fence]) -> None:
        async with self._chores.connection() as connection:
            given = await hand_over(connection, fences)
        self._waker.wake(self._settings.pool, len(given))

    async def _drain(self) -> None:
        if self._runs:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._settings.drain_grace_s)
        for held in list(self._runs.values()):
            self._stop(held, Stop.HAND_OVER)
        if self._runs:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _STUCK_AFTER_S)
        if self._runs:  # graphs that hold their loop: given back from here
            await self._hand_over(list(self._runs))
        while self._background:
            await asyncio.wait(self._background)
        self._runs.clear()
        await self._keeper.settle()

    async def _close(self) -> None:
        await self._waker.flush()
        async with self._chores.connection() as connection:
            await sign_off(connection, self._id)
        if not await asyncio.to_thread(self._thread.close, _STUCK_AFTER_S):
            _log.warning("a graph still holds its thread; leaving without it")
        await self._permits.aclose()
        await self._leases.close()
        await self._chores.close()
        await self._redis.aclose()
        await self._ring_redis.aclose()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@asynccontextmanager
async def _running(loops: list[Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Run endless loops beside the block; they are cancelled with it. A loop that fails ends the block."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_forever(loop)) for loop in loops]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _forever(loop: Callable[[], Awaitable[None]]) -> None:
    await loop()
