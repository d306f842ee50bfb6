"""The runs that this executor holds leases on: renewed, cancelled, ended or given back, whatever their graphs do."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import psycopg
from redis.asyncio import Redis

from sandfleet.fleet.executor.execution import Ended, Stop
from sandfleet.fleet.executor.fenced_rows import register, statement
from sandfleet.fleet.executor.graph_thread import GraphThread
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.session import Session
from sandfleet.shared.cancel_keys import read_cancels
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import ClaimedRun, end_attempt, hand_over, renew
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.orders import orders
from sandfleet.shared.store.placements import suspend_for_room
from sandfleet.shared.streams.announce import announce_ends
from sandfleet.shared.waker import Waker

_log = logging.getLogger(__name__)

STUCK_AFTER_S = 2.0
"""How long a graph may ignore that it is told to stop before the control loop goes on without it."""

_TELL_AGAIN_S = 5.0
"""A graph that has swallowed its cancellation, as a retry loop does, is cancelled again after this."""

_AGAIN_S = 0.25
_TRY_AGAIN_S = 1.0
_TIMEOUT_ERROR = (
    '{"error": "RunTimeout", "message": "The run exceeded its time limit, and its graph did not stop."}'
)


class _Held:
    def __init__(self, run: ClaimedRun, lease: Lease) -> None:
        self.run = run
        self.lease = lease
        self.stop: Stop | None = None
        self.stop_sent = 0.0
        self.left_alone: float | None = None  # when the run was ended without its graph
        self.try_end_at = 0.0
        self.no_room = False  # it is given back to wait for room


class HeldRuns:
    """Lives on the control loop. A run keeps its slot until its graph has ended, also when it went on without it.

    ``on_free`` is called when slots became free.
    """

    def __init__(
        self,
        settings: Settings,
        thread: GraphThread,
        redis: "Redis",
        waker: Waker,
        on_free: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._thread = thread
        self._redis = redis
        self._waker = waker
        self._on_free = on_free
        # Renewals have a connection of their own: no other statement's lock or answer is ever before them.
        self._leases = Session(settings.database_url, "sandfleet-leases", max(1.0, settings.lease_s / 3))
        self._orders = Session(settings.database_url, "sandfleet-orders", 10.0)
        self._runs: dict[Fence, _Held] = {}
        self._leaving: dict[Fence, None] = {}
        self._giving: asyncio.Task[None] | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __len__(self) -> int:
        """Slots that are taken."""
        return len(self._runs)

    def fences(self) -> list[Fence]:
        """The runs that have a slot here."""
        return list(self._runs)

    def all_ours(self) -> bool:
        """Whether each graph that is at work here has a lease: none was lost, or may have run out unnoticed."""
        now = time.monotonic()
        return all(not held.lease.superseded and now < held.lease.deadline for held in self._runs.values())

    def add(self, run: ClaimedRun, deadline: float) -> None:
        """Begin a claimed run, whose lease holds until ``deadline`` on the monotonic clock."""
        held = _Held(run, Lease(deadline))
        self._runs[run.fence] = held
        self._all_ended.clear()
        self._thread.run(run, held.lease)

    # --- leases ------------------------------------------------------------------------------------------------

    async def renew_forever(self) -> None:
        """Renew all leases, every ``renew_every_s``; what could not be renewed is tried again at once."""
        while True:
            try:
                complete = await self._renew()
            except Exception as error:
                _log.warning("renewing leases failed: %s", type(error).__name__)
                complete = False
            await asyncio.sleep(self._settings.renew_every_s if complete else _AGAIN_S)

    async def _renew(self) -> bool:
        fences = [fence for fence, held in self._runs.items() if not held.lease.superseded]
        if not fences:
            return True
        reach("renewal.before")
        sent = time.monotonic()
        async with self._leases.connection() as connection:
            renewal = await renew(connection, fences, self._settings.lease_s)
        for fence in fences:
            held = self._runs.get(fence)
            if held is None or fence in renewal.locked:
                continue
            if fence in renewal.held:
                held.lease.deadline = sent + self._settings.lease_s
                if action := renewal.held[fence]:
                    self._stop(held, Stop(action))
            else:
                self._abandon(held)
        return not renewal.locked

    def _abandon(self, held: _Held) -> None:
        """The run is no longer ours: its graph is fenced off, and told so."""
        held.lease.superseded = True
        self._stop(held, Stop.SUPERSEDED)
        self._note_ended()

    # --- cancels -----------------------------------------------------------------------------------------------

    async def poll_cancel_keys(self) -> None:
        """Look into Redis for runs that are to end."""
        if self._runs:
            self._stop_all(await read_cancels(self._redis, list(self._runs)))

    async def poll_orders(self, *, may_sweep: bool) -> float | None:
        """Look into PostgreSQL for runs that are to end, since Redis may have lost the key, and for our turn to sweep.

        Returns the seconds until the turn after this one if it is ours, else None.
        """
        async with self._orders.connection() as connection:
            found = await orders(
                connection,
                list(self._runs),
                sweep_every_s=self._settings.sweep_every_s,
                may_sweep=may_sweep,
            )
        self._stop_all(found.cancels)
        return found.next_sweep_s

    def _stop_all(self, found: dict[Fence, str]) -> None:
        for fence, action in found.items():
            if held := self._runs.get(fence):
                self._stop(held, Stop(action))

    def _stop(self, held: _Held, reason: Stop) -> None:
        if held.stop is None or (reason is Stop.SUPERSEDED and held.stop is not Stop.SUPERSEDED):
            held.stop = reason
            held.stop_sent = time.monotonic()
            self._thread.stop(held.run.fence, reason)

    # --- graphs that do not do as they are told ----------------------------------------------------------------

    async def tend_stuck(self) -> None:
        """End runs whose graph does not come back after a cancel or its timeout, and give back those that a blocked loop
        keeps from beginning. The stuck coroutine is fenced from then on and keeps its slot until it ends."""
        now = time.monotonic()
        stalled = self._thread.watch.stalled()
        patience_s = 0.0 if stalled else STUCK_AFTER_S
        for held in list(self._runs.values()):
            if held.lease.superseded:
                if now > held.stop_sent + _TELL_AGAIN_S:
                    held.stop_sent = now
                    self._thread.stop(held.run.fence, Stop.SUPERSEDED)
            elif now < held.try_end_at or held.run.fence in self._leaving:
                continue
            elif held.stop in (Stop.INTERRUPT, Stop.ROLLBACK) and now > held.stop_sent + patience_s:
                await self._end(held, "interrupted", None)
            elif now > held.lease.claimed + held.run.remaining_s + patience_s:
                await self._end(held, "timeout", _TIMEOUT_ERROR)
            elif stalled and not held.lease.begun:
                held.lease.superseded = True  # so that it is not begun when the loop is free again
                self.give_back([held.run.fence])

    async def _end(self, held: _Held, status: str, error: str | None) -> None:
        held.try_end_at = time.monotonic() + _TRY_AGAIN_S
        try:
            await self._keep_usage([held.run.fence])
            async with self._orders.connection() as connection:
                ended, ready = await end_attempt(
                    connection, held.run.fence, status, error, rollback=held.stop is Stop.ROLLBACK
                )
        except (
            psycopg.Error,
            OSError,
            TimeoutError,
        ) as problem:  # a lock, or no server: the others have their turn
            _log.warning("ending a stuck run failed: %s", type(problem).__name__, extra=_about(held))
            return
        self._waker.wake_all(ready)
        if held.run.fence in self._runs:
            self._abandon(held)
            if ended:
                held.left_alone = time.monotonic()
                _log.warning(
                    "a run has ended without its graph, which did not stop and keeps its slot until it does",
                    extra=_about(held),
                )
        if ended and held.stop is not Stop.ROLLBACK:
            fence = held.run.fence
            over = EndedRun(fence.key.run_id, fence.attempt + 1, error)
            await announce_ends(self._redis, self._settings, [over])

    async def _keep_usage(self, fences: Iterable[Fence]) -> None:
        """Write what attempts whose graphs are still at work have used of models: their own loop may be blocked, and their
        fences hold no longer."""
        batch = [(fence, rows) for fence in fences if (rows := self._thread.usage_of(fence))]
        if not batch:
            return
        query, parameters = statement(batch)
        async with self._orders.connection() as connection:
            register(connection)
            await connection.execute(query, parameters, binary=True)

    # --- the ends of runs --------------------------------------------------------------------------------------

    def ended(self, fence: Fence, ended: Ended) -> None:
        """The graph of a run has ended here."""
        self._waker.wake_all(ended.ready)
        held = self._runs.get(fence)
        if held is not None and held.left_alone is not None:
            stuck_s = time.monotonic() - held.left_alone
            _log.warning(
                "a stuck graph has ended: its slot is free",
                extra={**_about(held), "stuck_s": round(stuck_s, 1)},
            )
        if ended.hand_over and held is not None and not held.lease.superseded:
            held.no_room = ended.no_room
            self.give_back([fence])
        else:
            self._forget(fence)

    def give_back(self, fences: Iterable[Fence]) -> None:
        """Return runs as ready, in the background: many at a time, and again until PostgreSQL answers."""
        self._leaving.update(dict.fromkeys(fences))
        if self._leaving and (self._giving is None or self._giving.done()):
            self._giving = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        await asyncio.sleep(0)  # those that end in the same moment share the statement
        while self._leaving:
            fences = list(self._leaving)
            reach("hand_over.before")
            try:
                await self._suspend([fence for fence in fences if self._waits_for_room(fence)])
                fences = list(self._leaving)
                await self._keep_usage(fences)
                async with self._orders.connection() as connection:
                    given, locked = await hand_over(connection, fences)
            except (psycopg.Error, OSError, TimeoutError) as error:
                _log.warning("handing runs over failed: %s", type(error).__name__)
                await asyncio.sleep(_AGAIN_S)
                continue
            self._waker.wake(self._settings.pool, len(given))
            for fence in fences:
                if fence not in locked:
                    del self._leaving[fence]
                    self._let_go(fence)
            if locked:
                await asyncio.sleep(_AGAIN_S)

    def _waits_for_room(self, fence: Fence) -> bool:
        held = self._runs.get(fence)
        return held is not None and held.no_room

    async def _suspend(self, fences: list[Fence]) -> None:
        for fence in fences:
            async with self._orders.connection() as connection:
                ready = await suspend_for_room(connection, fence)
            self._waker.wake_all(ready)
            del self._leaving[fence]
            self._forget(fence)

    def _let_go(self, fence: Fence) -> None:
        held = self._runs.get(fence)
        if held is not None and (self._thread.works_on(fence) or not held.lease.begun):
            self._abandon(held)
        else:
            self._forget(fence)

    async def hand_over_all(self, give_up_after_s: float) -> None:
        """Break off what still runs, at its newest checkpoint, and give it all back; gives up when PostgreSQL does not
        take it within ``give_up_after_s``."""
        for held in list(self._runs.values()):
            self._stop(held, Stop.HAND_OVER)
        if not self._thread.watch.stalled():
            await self.wait_until_ended(STUCK_AFTER_S)
        self.give_back(fence for fence, held in self._runs.items() if not held.lease.superseded)
        if self._giving is not None and not self._giving.done():
            _, late = await asyncio.wait([self._giving], timeout=give_up_after_s)
            for task in late:
                _log.warning("%d runs were not handed over: their leases run out", len(self._leaving))
                task.cancel()
                await asyncio.wait([task])

    async def wait_until_ended(self, timeout_s: float) -> bool:
        """Whether all runs had ended here, or went on without their graphs, within ``timeout_s``."""
        try:
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._leases.close()
        await self._orders.close()

    def _forget(self, fence: Fence) -> None:
        if self._runs.pop(fence, None) is not None:
            self._note_ended()
            self._on_free()

    def _note_ended(self) -> None:
        if all(held.lease.superseded for held in self._runs.values()):
            self._all_ended.set()


def _about(held: _Held) -> dict[str, str]:
    key = held.run.fence.key
    return {"run_id": str(key.run_id), "tenant": key.tenant, "graph": held.run.graph_id}
