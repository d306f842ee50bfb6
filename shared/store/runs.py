"""Runs as readers see them, and their deletion. They are accepted, cancelled and claimed elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from psycopg.rows import class_row

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Owner, RunKey
from sandfleet.shared.store import threads
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S, Cancelled, cancel_on
from sandfleet.shared.store.ready import ready_by_pool
from sandfleet.shared.store.undoing import settle_thread, undo_run

T = TypeVar("T")

ACTIVE = ("pending", "running")
"""Statuses of a run that is not over."""

STATUSES = (*ACTIVE, "success", "error", "timeout", "interrupted")

CANCELS_ON_DISCONNECT = '{"on_disconnect":"cancel",'
"""How the ``kwargs`` of a run begin that a lost client cancels. PostgreSQL cannot look into JSON with U+0000 in it."""

_MISSING = "Run not found."
_COLUMNS = """run_id, thread_id, assistant_id, status, pool, multitask_strategy, parent_run, kwargs::text as kwargs,
  metadata::text as metadata, created_at, updated_at"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the API shows it. ``kwargs`` and ``metadata`` are JSON texts."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    status: str
    pool: str
    multitask_strategy: str
    parent_run: UUID | None
    kwargs: str
    metadata: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class RunState:
    """What a stream or a wait needs to know of a run."""

    run_id: UUID
    thread_id: UUID
    status: str
    pool: str
    cancel_on_disconnect: bool
    output: str | None
    """JSON text; what it holds depends on the run's kind."""
    error: str | None
    """JSON text of {error, message}."""


@dataclass(frozen=True, slots=True)
class Times:
    """When each stage of a run began, on the database's clock; None for a stage that has not happened."""

    created_at: datetime
    ready_at: datetime | None
    started_at: datetime | None
    prepared_at: datetime | None
    first_model_request_at: datetime | None
    first_output_at: datetime | None
    finished_at: datetime | None


async def get(pool: Pool, owner: Owner, thread_id: UUID | None, run_id: UUID) -> Run:
    """One run, of this thread if one is named. Raises NotFound."""
    return await _read(pool, Run, f"{_COLUMNS} {_ONE} and kind = 'run'", _one(owner, thread_id, run_id))


async def state(pool: Pool, owner: Owner, thread_id: UUID | None, run_id: UUID) -> RunState:
    """How a run or an operation stands. Raises NotFound."""
    return await _read(
        pool,
        RunState,
        f"""run_id, thread_id, status, pool, starts_with(kwargs::text, %(cancels)s) as cancel_on_disconnect,
            output::text as output, error::text as error {_ONE}""",
        {**_one(owner, thread_id, run_id), "cancels": CANCELS_ON_DISCONNECT},
    )


async def times(pool: Pool, owner: Owner, thread_id: UUID | None, run_id: UUID) -> Times:
    """The recorded times of a run. Raises NotFound."""
    return await _read(
        pool,
        Times,
        f"""created_at, ready_at, started_at, prepared_at, first_model_request_at, first_output_at, finished_at
            {_ONE} and kind = 'run'""",
        _one(owner, thread_id, run_id),
    )


_ONE = """from runs where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
  and (%(thread_id)s::uuid is null or thread_id = %(thread_id)s::uuid)"""


def _one(owner: Owner, thread_id: UUID | None, run_id: UUID) -> dict[str, Any]:
    return {"tenant": owner.tenant, "user_id": owner.user_id, "thread_id": thread_id, "run_id": run_id}


async def _read(pool: Pool, kind: type[T], selected: str, values: dict[str, Any]) -> T:
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(kind)) as cursor:
        await cursor.execute(f"select {selected}".encode(), values)
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(_MISSING)
    return row


async def of_thread(
    pool: Pool, owner: Owner, thread_id: UUID, *, status: str | None, limit: int, offset: int
) -> list[Run]:
    """Runs of a thread, newest first, of one of `STATUSES` or of all. Raises NotFound for an unknown thread."""
    await threads.require(pool, owner, thread_id)
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Run)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS} from runs
                where tenant = %(tenant)s and user_id = %(user_id)s and thread_id = %(thread_id)s and kind = 'run'
                  and (%(status)s::text is null or status = %(status)s)
                order by seq desc limit %(limit)s offset %(offset)s""",
            {
                "tenant": owner.tenant,
                "user_id": owner.user_id,
                "thread_id": thread_id,
                "status": status,
                "limit": limit,
                "offset": offset,
            },
        )
        return await cursor.fetchall()


async def active(pool: Pool, owner: Owner, statuses: Sequence[str]) -> list[UUID]:
    """The owner's runs in any of these statuses, the newest first, so that cancelling them in this order passes a
    thread on to none of them."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select run_id from runs where tenant = %s and user_id = %s and kind = 'run' and status = any(%s)
               order by seq desc""",
            (*owner, list(statuses)),
        )
        return [row[0] for row in await cursor.fetchall()]


async def existing(pool: Pool, owner: Owner, thread_id: UUID, run_ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs belong to the thread."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select run_id from runs
               where tenant = %s and user_id = %s and thread_id = %s and kind = 'run' and run_id = any(%s)""",
            (*owner, thread_id, list(run_ids)),
        )
        return {row[0] for row in await cursor.fetchall()}


async def delete(pool: Pool, owner: Owner, thread_id: UUID, run_id: UUID) -> Cancelled:
    """Remove a run with its checkpoints, states, journal and tool calls; one that is not over ends first.

    The thread is then as if the run had never been; the run's descendants are cancelled. Returns whom to tell: an executor may still work on the run, which is superseded. Raises NotFound.
    """
    async with pool.connection() as connection, connection.transaction():
        if not await threads.lock(connection, owner, thread_id):
            raise NotFound(_MISSING)
        cursor = await connection.execute(f"select status {_ONE}", _one(owner, thread_id, run_id))
        row = await cursor.fetchone()
        if row is None:
            raise NotFound(_MISSING)
        cancelled = await cancel_on(connection, owner, [run_id], "rollback")
        if run_id in cancelled.stop:
            cursor = await connection.execute(
                "select ready_pool, ready_count from end_run(%s, %s, %s, 'interrupted', null, %s)",
                (*owner, run_id, TEMPORARY_KEEP_S),
            )
            for pool_name, count in ready_by_pool(await cursor.fetchall()).items():
                cancelled.ready[pool_name] = cancelled.ready.get(pool_name, 0) + count
        await undo_run(connection, RunKey(*owner, run_id))
        return cancelled.without([run_id])


async def forget_operation(pool: Pool, owner: Owner, thread_id: UUID, run_id: UUID, *, failed: bool) -> None:
    """Remove the trace of an operation that is over, but not what it did. After a failure, which changed nothing, the
    thread's status is again what its newest state says."""
    async with pool.connection() as connection, connection.transaction():
        if not await threads.lock(connection, owner, thread_id):
            return
        cursor = await connection.execute(
            f"""delete {_ONE} and kind <> 'run' and status not in ('pending', 'running') returning 1""",
            _one(owner, thread_id, run_id),
        )
        if await cursor.fetchone():
            await connection.execute(
                "delete from journal where tenant = %s and user_id = %s and run_id = %s", (*owner, run_id)
            )
            if failed:
                await settle_thread(connection, owner, thread_id)
