"""The control loop of an executor: claims, leases, cancels, sweep, signals. It never runs a line of a graph."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from redis.asyncio import Redis

from sandfleet.fleet.executor import traces
from sandfleet.fleet.executor.execution import Ended
from sandfleet.fleet.executor.graph_thread import GraphThread
from sandfleet.fleet.executor.held_runs import STUCK_AFTER_S, HeldRuns
from sandfleet.fleet.executor.own_task import read_own_task
from sandfleet.fleet.executor.permit_keeper import PermitKeeper
from sandfleet.fleet.executor.quarantine import Quarantine
from sandfleet.fleet.executor.registration import executor_id, heartbeat, register_when_reachable, sign_off
from sandfleet.fleet.executor.session import Session
from sandfleet.fleet.executor.task_protection import TaskProtection
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.shared.ids import Fence
from sandfleet.shared.permits import Permits
from sandfleet.shared.rings import ring, wait_for_ring
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import advance_clocks, claim, give_back_lost
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.ready import count_ready
from sandfleet.shared.store.sweep import LIMITS, sweep_as_configured
from sandfleet.shared.streams.announce import announce_ends
from sandfleet.shared.templates import Templates
from sandfleet.shared.top_up import TOP_UP_EVERY_S, missing_permits, wanted_permits
from sandfleet.shared.waker import Waker

_log = logging.getLogger(__name__)

_STARVATION_GUARD = 8
"""Every eighth claim takes the class that has waited longest, so that interactive runs never starve batch runs."""

_CLOCK_GATHER_S = 0.02
_RING_BLOCK_S = 5
_ORDERS_EVERY_S = 1.0
_HEARTBEAT_EVERY_S = 3.0
_NEXT_SUSPECT_S = 0.25
_NO_SUSPECT_S = 5.0
_SUSPECTS_EVERY_S = 1.0
_PROTECTION_EVERY_S = 0.25
_LOOK_EVERY_S = 0.25
_LOST_EVERY_S = 1.0
_PAUSE_AFTER_ERROR_S = 0.5
_CANCEL_AGAIN_S = 0.5
_GIVE_UP_S = 5.0
"""How long a draining executor waits for a server that does not answer, at each step of its end."""


class Executor:
    """One executor process. `run` serves until `drain` has been called and is finished.

    With ``suspects``, its id then, it takes only runs that one more death ends, and drains itself when there are none.
    """

    def __init__(
        self,
        settings: Settings,
        graphs: dict[str, Graph],
        templates: Templates,
        *,
        suspects: str | None = None,
    ) -> None:
        self._settings = settings
        self._graphs = graphs
        self._templates = templates
        self._id = suspects or executor_id(settings.pool)
        self._suspects = suspects is not None
        self._busy_at = time.monotonic()
        self._claim_now = asyncio.Event()
        self._claims = 0
        self._was_full = False  # at the last claim: runs may be ready that found no slot
        self._clocks: dict[int, int] = {}
        self._advancing: asyncio.Task[None] | None = None
        self._claim_in_doubt_until = 0.0
        self._claiming: asyncio.Task[bool] | None = None
        self._draining = asyncio.Event()
        self._hurry = asyncio.Event()
        self._slot_free = asyncio.Event()
        # Cleared while a graph holds the graphs' loop, or the executor is one too many.
        self._takes_runs = asyncio.Event()
        self._takes_runs.set()
        self._retiring = self._replaced = False
        self._task: str | None = None
        self._our_turn = asyncio.Event()  # to sweep; cleared when it is done
        self._loop = asyncio.get_running_loop()
        # No socket_timeout: on Python 3.11 it may swallow a cancellation. Each call has a limit of its own.
        self._redis = Redis.from_url(settings.redis_url)
        self._ring_redis = Redis.from_url(settings.redis_url)
        self._permits = Permits(settings)
        self._waker = Waker(self._redis, self._permits, self._count_ready)
        self._claimer = Session(settings.database_url, "sandfleet-claims", settings.lease_s)
        self._chores = Session(settings.database_url, "sandfleet-sweep", 30.0, LIMITS)
        self._quarantine = Quarantine(settings, self._chores)
        self._thread = GraphThread(settings, graphs, templates, self._on_ended)
        self._held = HeldRuns(settings, self._thread, self._redis, self._waker, self._on_free)
        self._thread.metrics.watch_active(self._held.__len__)
        self._keeper = PermitKeeper(
            self._permits,
            settings.pool,
            slots=settings.slots,
            long_poll_s=settings.long_poll_s,
            visibility_s=settings.visibility_timeout_s,
            busy=self._held.__len__,
            ready=self._responsive,
            on_poll=self._claim_now.set,
        )
        self._background: set[asyncio.Task[None]] = set()

    def drain(self) -> None:
        """Stop claiming, let runs finish within the grace period, hand the rest over. Called by the signal handler; a
        second call ends the grace period."""
        if self._draining.is_set():
            self._hurry.set()
        self._draining.set()

    def leave(self) -> None:
        """Drain without a grace period."""
        self._hurry.set()
        self._draining.set()

    async def run(self) -> None:
        """Serve until drained. Returns when every run has ended here or was handed over.

        Raises what starting raised; an executor that is drained while it starts just ends.
        """
        if self._suspects or await self._register():
            await asyncio.to_thread(self._thread.start)
            await self._serve()
        await self._close()

    async def _register(self) -> bool:
        """Tell the API what is served here, as soon as PostgreSQL answers. False if drained before."""
        registering = asyncio.create_task(
            register_when_reachable(self._chores, self._settings.pool, self._graphs, self._templates)
        )
        draining = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait([registering, draining], return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                registering.result()
            return not self._draining.is_set()
        finally:
            registering.cancel()
            draining.cancel()
            await asyncio.gather(registering, draining, return_exceptions=True)

    async def _serve(self) -> None:
        settings = self._settings
        claiming: list[Callable[[], Awaitable[None]]] = [self._claim_forever]
        orders_every_s = min(_ORDERS_EVERY_S, settings.sweep_every_s)
        duties: list[Callable[[], Awaitable[None]]] = [
            self._held.renew_forever,
            self._every(settings.cancel_poll_ms / 1000, self._held.poll_cancel_keys),
            self._every(settings.cancel_poll_ms / 1000, self._held.tend_stuck),
            self._every(orders_every_s, self._follow_orders),
            self._every(_LOOK_EVERY_S, self._look_at_the_graphs),
            self._every(_LOST_EVERY_S, self._give_back_lost),
        ]
        if self._suspects:
            claiming.append(self._every(_NEXT_SUSPECT_S, self._ask_for_the_next_suspect))
        else:
            claiming += [
                self._listen_for_rings,
                self._every(_SUSPECTS_EVERY_S, self._quarantine.look_for_suspects),
            ]
            duties += [
                self._every(0.0, self._sweep),
                self._every(TOP_UP_EVERY_S, self._top_up),
                self._every(_HEARTBEAT_EVERY_S, self._heartbeat),
            ]
            if settings.ecs_metadata_uri:
                self._task = await read_own_task(settings.ecs_metadata_uri)
            if settings.ecs_agent_uri:
                protection = TaskProtection(settings.ecs_agent_uri, self._keeps_its_task)
                duties.append(self._every(_PROTECTION_EVERY_S, protection.protect_the_task))
            if self._permits.has_queue(settings.pool):
                claiming.append(self._keeper.receive)
                duties.append(self._keeper.extend)
        self._claim_now.set()
        _log.info("executor is ready", extra={"executor_id": self._id, "pool": settings.pool})
        async with _running(duties):
            async with _running(claiming):
                await self._draining.wait()
            self._quarantine.dismiss()
            await self._drain()

    # --- claiming ----------------------------------------------------------------------------------------------

    async def _claim_forever(self) -> None:
        while True:
            await self._claim_now.wait()
            if not self._takes_runs.is_set():
                await self._keeper.give_back()
                await self._responsive()
            self._claim_now.clear()
            try:
                while (free := self._free()) > 0:
                    # Not cancelled by a drain: runs whose claim is committed must not be forgotten.
                    self._claiming = asyncio.create_task(self._claim(free))
                    if not await asyncio.shield(self._claiming):
                        break
                self._was_full = free <= 0
            except (psycopg.Error, OSError, TimeoutError) as error:
                _log.warning("claiming failed: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                self._claim_now.set()
            self._keeper.settle_soon()

    def _free(self) -> int:
        """Slots for further runs. A suspect that was lost here may kill this process as long as its graph has not ended:
        the next one would be blamed for it."""
        if self._suspects and not self._held.all_ours():
            return 0
        return self._settings.slots - len(self._held)

    async def _claim(self, free: int) -> bool:
        """Claim once; true if there may be more to claim."""
        settings = self._settings
        self._claims += 1
        longest = not self._suspects and self._claims % _STARVATION_GUARD == 0
        sent = time.monotonic()
        async with self._claimer.connection() as connection:
            try:
                claimed = await claim(
                    connection,
                    settings.pool,
                    self._id,
                    settings.lease_s,
                    free,
                    longest_waiting=longest,
                    poison_limit=settings.poison_limit,
                    suspects=self._suspects,
                )
            except (psycopg.Error, OSError, TimeoutError):
                # It may have been carried out, or be so yet by a server that was frozen.
                self._claim_in_doubt_until = time.monotonic() + settings.lease_s
                raise
            for run in claimed:
                self._held.add(run, sent + settings.lease_s)
                self._clocks[run.run_class] = max(run.vtime, self._clocks.get(run.run_class, 0))
        if self._clocks and (self._advancing is None or self._advancing.done()):
            self._advancing = self._spawn(self._advance_clocks())
        return len(claimed) == (1 if longest else free)

    async def _give_back_lost(self) -> None:
        """Let others have what a claim took whose reply did not come. On the connection of claims: no other one is under
        way meanwhile, whose runs are not known here yet."""
        if time.monotonic() < self._claim_in_doubt_until:
            async with self._claimer.connection() as connection:
                lost = await give_back_lost(connection, self._id, self._held.fences())
            self._waker.wake(self._settings.pool, len(lost))

    async def _ask_for_the_next_suspect(self) -> None:
        """The database gives one at a time, and nobody rings when this one has proved not to kill its executor."""
        now = time.monotonic()
        if self._held:
            self._busy_at = now
        elif now > self._busy_at + _NO_SUSPECT_S:
            self.drain()
        self._claim_now.set()

    async def _listen_for_rings(self) -> None:
        """Block on the pool's ring while a slot is free."""
        pool = self._settings.pool
        while True:
            while len(self._held) >= self._settings.slots:
                self._slot_free.clear()
                await self._slot_free.wait()
            await self._responsive()
            try:
                if await wait_for_ring(self._ring_redis, pool, _RING_BLOCK_S):
                    if not self._takes_runs.is_set():
                        await ring(self._redis, {pool: 1})  # for somebody who can take the run
                    self._claim_now.set()
            except Exception as error:
                _log.warning("listening for rings failed: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _responsive(self) -> None:
        """Return when no graph holds the graphs' loop, since what is claimed before that would only wait, and the executor is
        not one too many."""
        await self._takes_runs.wait()

    async def _advance_clocks(self) -> None:
        """Move the virtual clocks to what was claimed. A run that becomes ready meanwhile may start a claim or two
        earlier than its turn, no more."""
        while self._clocks:
            await asyncio.sleep(_CLOCK_GATHER_S)
            clocks, self._clocks = self._clocks, {}
            try:
                async with self._claimer.connection() as connection:
                    await advance_clocks(connection, self._settings.pool, clocks)
            except (psycopg.Error, OSError, TimeoutError) as error:  # the next claim moves them further
                _log.warning("advancing the clocks failed: %s", type(error).__name__)

    def _executes(self) -> bool:
        """Whether a run is executed here, or in the process for suspects."""
        return bool(self._held) or self._quarantine.alive

    def _keeps_its_task(self) -> bool:
        """Whether ECS may not take the task: not if a newer version replaces it, since runs that last would hold up the
        deployment. It is told to stop then, and hands over what it does not finish."""
        return self._executes() and not self._replaced

    async def _count_ready(self, pool: str, limit: int) -> int:
        async with self._claimer.connection() as connection:
            return await count_ready(connection, pool, limit)

    # --- chores ------------------------------------------------------------------------------------------------

    async def _look_at_the_graphs(self) -> None:
        self._thread.watch.look()
        if self._retiring or self._thread.watch.stalled():
            self._takes_runs.clear()
        else:
            self._takes_runs.set()

    async def _follow_orders(self) -> float | None:
        """Returns when to look again if that is sooner than usual: a lease ends, and nobody has renewed it."""
        next_sweep_s = await self._held.poll_orders(
            may_sweep=not self._suspects and not self._our_turn.is_set()
        )
        if next_sweep_s is not None:
            self._our_turn.set()
        return next_sweep_s

    async def _sweep(self) -> None:
        """Sweep once when it is this executor's turn."""
        await self._our_turn.wait()
        ended: list[EndedRun] = []
        try:
            async with self._chores.connection() as connection:
                ready = await sweep_as_configured(connection, self._settings, ended)
        finally:
            self._our_turn.clear()
            await announce_ends(self._redis, self._settings, ended)
        self._waker.wake_all(ready)
        if self._settings.pool in ready and not self._draining.is_set():
            self._claim_now.set()  # a frozen executor may get the ring, and the permit

    async def _top_up(self) -> None:
        """Top queues up when it is this executor's turn."""
        async with self._chores.connection() as connection:
            wanted = await wanted_permits(connection)
        self._waker.wake_all(await missing_permits(self._permits, wanted))

    async def _heartbeat(self) -> None:
        settings, lag_ms = self._settings, self._thread.watch.take_worst_ms()
        async with self._chores.connection() as connection:
            orders = await heartbeat(
                connection,
                self._id,
                settings.pool,
                settings.host_id or None,
                slots=settings.slots,
                busy=len(self._held),
                loop_lag_ms=lag_ms,
                task=self._task,
                draining=self._draining.is_set(),
            )
        self._replaced = orders.replaced
        if orders.retiring is self._retiring or self._draining.is_set():
            return
        self._retiring = orders.retiring
        await self._look_at_the_graphs()
        if orders.retiring:
            why = "a newer version replaces it" if orders.replaced else "there are executors enough"
            _log.info("takes no more runs: %s", why)
        else:
            _log.info("takes runs again")
        if not orders.retiring:
            self._claim_now.set()  # whoever rang meanwhile rang for somebody else

    def _every(
        self, pause_s: float, work: Callable[[], Awaitable[float | None]]
    ) -> Callable[[], Awaitable[None]]:
        """A loop that does ``work`` now and after every pause, or a shorter one that it returns; what fails is tried again
        at the next."""

        async def loop() -> None:
            failures = 0
            while True:
                sooner_s = None
                try:
                    sooner_s = await work()
                    failures = 0
                except Exception as error:
                    failures += 1
                    if failures & (failures - 1) == 0:  # not a line for each while a server is away
                        _log.warning("%s failed (%d): %s", work.__name__, failures, type(error).__name__)
                await asyncio.sleep(pause_s if sooner_s is None else min(pause_s, max(0.0, sooner_s)))

        return loop

    # --- the ends of runs --------------------------------------------------------------------------------------

    def _on_ended(self, fence: Fence, ended: Ended) -> None:
        """Called on the graphs' thread."""
        self._loop.call_soon_threadsafe(self._held.ended, fence, ended)

    def _on_free(self) -> None:
        self._slot_free.set()
        if self._was_full and not self._draining.is_set():
            self._claim_now.set()
        self._keeper.settle_soon()

    async def _drain(self) -> None:
        """After the claiming loops have been ended."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        await _in_time(self._give_back_lost())
        if not self._suspects:
            self._waker.wake(self._settings.pool)  # for a ring or permit that was taken, and not acted upon
        ended = asyncio.create_task(self._held.wait_until_ended(self._settings.drain_grace_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait([ended, hurry], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        hurry.cancel()
        await self._held.hand_over_all(_GIVE_UP_S)

    async def _close(self) -> None:
        """Each step for a while only: a server that does not answer keeps no executor from ending."""
        await _in_time(self._waker.flush())
        await _in_time(self._keeper.release())
        await _in_time(self._sign_off())
        await _in_time(self._quarantine.ended())
        if not await asyncio.to_thread(self._thread.close, STUCK_AFTER_S):
            _log.warning("a graph still holds its thread; leaving without it")
        await traces.flush(STUCK_AFTER_S)
        for task in self._background:
            task.cancel()
        for close in (
            self._permits.aclose,
            self._claimer.close,
            self._held.close,
            self._chores.close,
            self._redis.aclose,
            self._ring_redis.aclose,
        ):
            await _in_time(close())

    async def _sign_off(self) -> None:
        async with self._chores.connection() as connection:
            await sign_off(connection, self._id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _in_time(step: Awaitable[object]) -> None:
    try:
        await asyncio.wait_for(step, _GIVE_UP_S)
    except Exception as error:
        _log.warning("not closed cleanly: %s", type(error).__name__)


@asynccontextmanager
async def _running(loops: list[Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Run endless loops beside the block; they are cancelled with it. A loop that fails ends the block."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_forever(loop)) for loop in loops]
            yield
            await _end(tasks)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: a Redis client with a time limit may swallow a cancellation on Python 3.11."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)


async def _forever(loop: Callable[[], Awaitable[None]]) -> None:
    await loop()
