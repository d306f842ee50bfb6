"""The one group-commit writer of an executor process: whatever all runs have pending, in one statement per flush.

A flush locks the named runs, checks that their attempts still hold, and inserts the rows of those that passed, all in one
statement and so in one transaction: what it writes is fenced even against a successor that claims the run meanwhile.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection

from sandfleet.fleet.executor import fenced_rows
from sandfleet.fleet.executor.fenced_rows import Row
from sandfleet.shared.db.vanished import KEEPALIVES
from sandfleet.shared.errors import SandfleetError, Superseded, Unavailable
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, Owner

_log = logging.getLogger(__name__)

_BACKOFF_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
# SQLSTATE classes after which the same rows may succeed: connection, deadlock, resources, object state, operator, system.
_TRANSIENT_CLASSES = ("08", "40", "53", "55", "57", "58")
_LOCKED = "55P03"
_READ_ONLY = "25006"  # a failover: the server that we are connected to has become a standby


class RowRefused(SandfleetError):
    """PostgreSQL cannot hold a value of this write, such as U+0000 in a node's name."""

    code = "row_refused"
    status = 500


class ExecutorStopped(Unavailable):
    """The executor stopped before this was written; another one goes on from what was."""


PUT_OFF_S = 1.0
"""How long rows are put off at most."""


class _Item(NamedTuple):
    who: Fence | Owner
    rows: Sequence[Row]
    size: int
    done: "asyncio.Future[None]"


class _PutOff(NamedTuple):
    rows: Sequence[Row]
    done: "asyncio.Future[None]"


class FencedWriter:
    """Writes rows for all runs of a process over a connection of its own, on the event loop that called ``start``.

    A flush waits for no timer: it takes what is pending, and the next one begins when it has ended, so that batches grow
    with the load. A flush is bounded by ``max_rows`` and ``max_bytes`` (payload; one item always fits). Lost connections are
    opened again and the rows written again, which is safe because repeated rows are ignored or replaced by themselves.
    """

    def __init__(self, database_url: str, *, max_rows: int = 500, max_bytes: int = 8 * 1024 * 1024) -> None:
        self._database_url = database_url
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._pending: deque[_Item] = deque()
        self._deferred: dict[Fence, _PutOff] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._newest: asyncio.Future[None] | None = None
        self._wake = asyncio.Event()
        self._connection: AsyncConnection[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.flushes = 0
        """Statements that were committed."""
        self.rows = 0
        """Rows in them, refused runs included."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the writer runs on; all its methods must be called there."""
        assert self._task is not None, "FencedWriter.start() was not called"
        return self._task.get_loop()

    async def start(self) -> None:
        """Begin to write. Does not wait for the database."""
        self._task = asyncio.create_task(self._run(), name="fenced-writer")

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Write what is pending, for at most ``deadline_s``, and close. What is left then fails with ExecutorStopped."""
        self._submit_all_put_off()
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=deadline_s)
            for task in late:
                task.cancel()
            await asyncio.wait([self._task])
        if self._connection is not None:
            await self._connection.close()
        while self._pending:
            _fail(self._pending.popleft(), _stopped())

    def submit(self, who: Fence | Owner, rows: Sequence[Row]) -> "asyncio.Future[None]":
        """Queue rows of one run; never blocks. Rows under a bare Owner are written without a fence.

        The future ends when they are committed, or fails with Superseded (none of them is written), RowRefused or
        ExecutorStopped. Submissions are committed in order, each as a whole. Nobody has to await
        the future, and cancelling it takes nothing back.
        """
        later = self._deferred.pop(who, None) if rows and isinstance(who, Fence) else None
        if later is not None:
            return self._queue(who, [*rows, *later.rows], later.done)
        return self._queue(who, rows, self.loop.create_future())

    def put_off(self, fence: Fence, rows: Sequence[Row]) -> "asyncio.Future[None]":
        """Let rows go along with whatever the run submits next, or after `PUT_OFF_S` with those of other runs: they cost no
        statement of their own while a run writes anything. They take the place of those that the run has put off before.

        The future is that of the submission which they become part of: it fails also for the sake of its other rows.
        """
        earlier = self._deferred.get(fence)
        done = self.loop.create_future() if earlier is None else earlier.done
        self._deferred[fence] = _PutOff(rows, done)
        if self._stopping:
            self.submit_put_off(fence)
        elif self._timer is None:
            self._timer = self.loop.call_later(PUT_OFF_S, self._submit_all_put_off)
        return done

    def submit_put_off(self, fence: Fence) -> None:
        """Submit what a run has put off, if anything."""
        later = self._deferred.pop(fence, None)
        if later is not None:
            self._queue(fence, later.rows, later.done)

    def _submit_all_put_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for fence in list(self._deferred):
            self.submit_put_off(fence)

    def _queue(
        self, who: Fence | Owner, rows: Sequence[Row], done: "asyncio.Future[None]"
    ) -> "asyncio.Future[None]":
        item = _Item(who, rows, sum(_size(row) for row in rows), done)
        if self._stopping:
            _fail(item, _stopped())
        elif not rows:
            done.set_result(None)
        else:
            self._pending.append(item)
            self._newest = done
            self._wake.set()
        return done

    async def drain(self) -> None:
        """Until all that was submitted before is committed or has failed. Never raises what a submission failed with."""
        if self._newest is not None and not self._newest.done():
            await asyncio.wait([self._newest])

    async def write(self, who: Fence | Owner, rows: Sequence[Row]) -> None:
        """``submit`` and wait. Raises what the future fails with. Cancelling the wait does not take the rows back."""
        await asyncio.shield(self.submit(who, rows))

    async def _run(self) -> None:
        taken: list[_Item] = []
        try:
            while True:
                while not self._pending:
                    if self._stopping:
                        return
                    self._wake.clear()
                    await self._wake.wait()
                taken = self._take()
                await self._flush(taken)
        except BaseException:
            # Only by `stop`, at its deadline. It fails the rest.
            self._stopping = True
            for item in taken:
                _fail(item, _stopped())
            raise

    def _take(self) -> list[_Item]:
        taken = [self._pending.popleft()]
        rows, size = len(taken[0].rows), taken[0].size
        while self._pending:
            rows += len(self._pending[0].rows)
            size += self._pending[0].size
            if rows > self._max_rows or size > self._max_bytes:
                break
            taken.append(self._pending.popleft())
        return taken

    async def _flush(self, items: Sequence[_Item]) -> None:
        """Write ``items`` in order, in one statement unless one of them is at fault."""
        batch = [(item.who, item.rows) for item in items]
        for attempt in range(1_000_000_000):
            try:
                passed = await self._execute(batch)
            except Exception as error:
                if self._may_pass_later(error):
                    await self._back_off(attempt, error)
                    continue
                if len(items) == 1:
                    _fail(items[0], _refusal(error))
                    return
                middle = len(items) // 2
                await self._flush(items[:middle])
                await self._flush(items[middle:])
                return
            for item in items:
                if item.who in passed:
                    if not item.done.done():
                        item.done.set_result(None)
                else:
                    _fail(item, Superseded("Another attempt, or the end of the run, came first."))
            return

    async def _execute(self, batch: fenced_rows.Batch) -> set[Fence | Owner]:
        query, parameters = fenced_rows.statement(batch)
        if self._connection is None or self._connection.closed:
            self._connection = await self._connect()
        reach("write.before")
        cursor = await self._connection.execute(query, parameters, binary=True)
        positions = await cursor.fetchall()
        self.flushes += 1
        self.rows += sum(len(rows) for _, rows in batch)
        names = fenced_rows.fences(batch)
        return {names[n] for (n,) in positions}

    async def _connect(self) -> AsyncConnection[Any]:
        connection = await AsyncConnection.connect(
            self._database_url,
            autocommit=True,
            prepare_threshold=0,
            connect_timeout=5,
            application_name="sandfleet-writer",
            **KEEPALIVES,
        )
        fenced_rows.register(connection)
        # Every lookup here is by key. A plan that was made while the tables were small must not scan them later.
        await connection.execute(
            "select set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),"
            " set_config('plan_cache_mode', 'force_generic_plan', false),"
            # Behind a held row a flush gives its other rows' locks back now and then, so that leases are renewed.
            " set_config('lock_timeout', '1s', false)"
        )
        return connection

    def _may_pass_later(self, error: Exception) -> bool:
        if isinstance(error, OSError):
            return True
        if not isinstance(error, psycopg.Error):
            return False
        if self._connection is None or self._connection.closed:
            return True
        if error.sqlstate is None:
            return isinstance(error, psycopg.OperationalError)
        return error.sqlstate[:2] in _TRANSIENT_CLASSES or error.sqlstate == _READ_ONLY

    async def _back_off(self, attempt: int, error: Exception) -> None:
        pause_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
        _log.warning(
            "write failed, trying again",
            extra={"error": _kind_of(error), "attempt": attempt + 1, "pause_s": pause_s},
        )
        if self._connection is not None and not _is_conflict(error):
            await self._connection.close()
            self._connection = None
        await asyncio.sleep(pause_s)


def _is_conflict(error: Exception) -> bool:
    """A deadlock, a serialization failure or a held lock: the connection is as good as before."""
    state = (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""
    return state.startswith("40") or state == _LOCKED


def _size(row: Row) -> int:
    return sum(len(value) for value in row if isinstance(value, (bytes, str)))


def _kind_of(error: Exception) -> str:
    """What happened, without the values that the message may quote."""
    state = getattr(error, "sqlstate", None)
    return f"{type(error).__name__} {state}" if state else type(error).__name__


def _refusal(error: Exception) -> RowRefused:
    return RowRefused(f"PostgreSQL cannot hold a value of this write ({_kind_of(error)}).")


def _stopped() -> ExecutorStopped:
    return ExecutorStopped("The executor stopped before this was written.")


def _fail(item: _Item, error: Exception) -> None:
    if not item.done.done():
        item.done.set_exception(error)
        item.done.exception()  # counts as retrieved: whoever does not await a write is not warned about it
