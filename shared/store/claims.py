"""The executor's side of a run: claim, renew, finish, hand over, and the sweep of what others left.

Every statement names (run, attempt), never the owner: by owner, a claim whose reply was lost would live for ever.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool
from sandfleet.shared.store.suspects import deaths_of_a_suspect

Connection = AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run that this executor holds a lease on. ``kwargs`` and ``metadata`` are parsed JSON objects."""

    fence: Fence
    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    kind: str
    run_class: int
    vtime: int
    kwargs: dict[str, Any]
    metadata: dict[str, Any]
    cancel_action: str | None
    claimed_at: datetime
    """The database's clock at the claim: the run's later times are this plus monotonic time."""
    timeout_s: float
    """The hard timeout, counted from the first start."""
    remaining_s: float
    """What is left of it."""
    resumes: bool
    """An earlier attempt of this run has written a checkpoint: go on from it, not from the input."""
    head_checkpoint_id: str | None
    """The thread's newest checkpoint; None when it has none."""


async def claim(
    connection: Connection,
    pool: str,
    owner: str,
    lease_s: float,
    limit: int,
    *,
    longest_waiting: bool,
    poison_limit: int = 5,
    suspects: bool = False,
) -> list[ClaimedRun]:
    """Claim up to ``limit`` ready runs of a pool in fair order, with leases of ``lease_s`` on the database's clock.

    Runs that the next death ends (their ``poison_limit``-th in a row) only come with ``suspects``, then nothing else does,
    and one at a time: the next when this one has written a checkpoint or ended."""
    suspect = deaths_of_a_suspect(poison_limit)
    cursor = await connection.execute(
        """
        select r.tenant, r.user_id, r.run_id, r.attempt, r.thread_id, r.assistant_id, r.graph_id, r.kind, r.class, r.vtime,
               r.kwargs, r.metadata, r.cancel_action, clock_timestamp(), r.timeout_s,
               r.timeout_s - extract(epoch from clock_timestamp() - r.started_at)::double precision,
               c.o_resumes, c.o_head
        from claim_runs(%s, %s, %s, %s, %s, %s, %s) c, lateral (select (c.o_run).*) r
        """,
        (pool, owner, lease_s, limit, longest_waiting, suspect, suspects),
    )
    rows = await cursor.fetchall()
    if rows:
        reach("run.claimed")
    return [ClaimedRun(Fence(RunKey(row[0], row[1], row[2]), row[3]), *row[4:]) for row in rows]


async def advance_clock(connection: Connection, pool: str, claimed: Iterable[ClaimedRun]) -> None:
    """Move the virtual clock of each class to the start times just claimed; never back."""
    newest: dict[int, int] = {}
    for run in claimed:
        newest[run.run_class] = max(run.vtime, newest.get(run.run_class, 0))
    for run_class, vtime in newest.items():
        await connection.execute(
            "update vclock set v = %s where pool = %s and class = %s and v < %s",
            (vtime, pool, run_class, vtime),
        )


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a renewal found. A fence in neither was superseded, or its run has ended."""

    held: dict[Fence, str | None]
    """The leases that were extended, each with a requested cancel action or None."""
    locked: set[Fence]
    """Still ours, but somebody holds the row: not extended now."""


_MATCHING = """
  join unnest(%s::text[], %s::text[], %s::uuid[], %s::int[]) f (tenant, user_id, run_id, attempt)
    on r.tenant = f.tenant and r.user_id = f.user_id and r.run_id = f.run_id and r.attempt = f.attempt"""


async def renew(connection: Connection, fences: Sequence[Fence], lease_s: float) -> Renewal:
    """Extend the leases of all runs at hand by one statement, which waits for nobody's lock: one run's row that is held
    for long must not cost the others their leases."""
    cursor = await connection.execute(
        f"""
        with held as materialized (
          select r.tenant, r.user_id, r.run_id from runs r {_MATCHING}
          where r.status = 'running' order by r.tenant, r.user_id, r.run_id for update of r skip locked)
        update runs r set lease_expires_at = clock_timestamp() + make_interval(secs => %s)
        from held h where r.tenant = h.tenant and r.user_id = h.user_id and r.run_id = h.run_id
        returning r.tenant, r.user_id, r.run_id, r.attempt, r.cancel_action
        """,
        (*_columns(fences), lease_s),
    )
    held = {Fence(RunKey(*row[:3]), row[3]): row[4] for row in await cursor.fetchall()}
    return Renewal(held, await _still_running(connection, [fence for fence in fences if fence not in held]))


async def _still_running(connection: Connection, fences: Sequence[Fence]) -> set[Fence]:
    """Which of these attempts hold their runs, as far as is committed."""
    if not fences:
        return set()
    cursor = await connection.execute(
        f"select r.tenant, r.user_id, r.run_id, r.attempt from runs r {_MATCHING} where r.status = 'running'",
        _columns(fences),
    )
    return {Fence(RunKey(*row[:3]), row[3]) for row in await cursor.fetchall()}


def _columns(fences: Sequence[Fence]) -> tuple[list[str], list[str], list[UUID], list[int]]:
    return (
        [f.key.tenant for f in fences],
        [f.key.user_id for f in fences],
        [f.key.run_id for f in fences],
        [f.attempt for f in fences],
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends. JSON bodies are texts; ``events`` is the JSON text of [[seq, event, data]…] up to ``end``."""

    status: Literal["success", "error", "timeout", "interrupted"]
    events: str
    error: str | None = None
    output: str | None = None
    partial: str | None = None
    thread_status: str | None = "idle"
    """idle, interrupted or error; None leaves the thread as it was before the run."""
    interrupts: str | None = "{}"
    rollback: bool = False
    """Erase the run and its checkpoints in the same transaction."""
    prepared_at: datetime | None = None
    first_model_request_at: datetime | None = None
    first_output_at: datetime | None = None


async def finish(connection: Connection, fence: Fence, ending: Ending) -> tuple[bool, ReadyRuns]:
    """The terminal transaction. Returns whether the run ended by this attempt (now, or before, when the reply of an
    earlier call was lost) and which pools got ready runs through it."""
    reach("finish.before")
    # The function holds the tenant's lock until its transaction ends. A statement on its own ends it in the server; a
    # block would hold it over two more round trips of a busy process, and serialise the tenant's runs behind them.
    async with connection.transaction() if ending.rollback else nullcontext():
        cursor = await connection.execute(
            """select * from finish_run(%s, %s, %s, %s, %s, %s::json, %s::json, %s::json, %s, %s::json, %s::json, %s, %s, %s, %s)""",
            (
                *fence.key,
                fence.attempt,
                ending.status,
                ending.error,
                ending.output,
                ending.partial,
                ending.thread_status,
                ending.interrupts,
                ending.events,
                TEMPORARY_KEEP_S,
                ending.prepared_at,
                ending.first_model_request_at,
                ending.first_output_at,
            ),
        )
        rows = await cursor.fetchall()
        if rows[0][0] == "done" and ending.rollback:
            await connection.execute("select erase_run(%s, %s, %s)", fence.key)
    reach("finish.committed")
    return rows[0][0] != "superseded", ready_by_pool((row[1], row[2]) for row in rows)


async def end_attempt(
    connection: Connection, fence: Fence, status: str, error: str | None, *, rollback: bool = False
) -> tuple[bool, ReadyRuns]:
    """End a run whose graph does not, by the next attempt, if this attempt still holds it. ``error`` is JSON text, None
    for a cancelled run; ``rollback`` erases the run in the same transaction. Returns whether it ended by this call."""
    # Erased later, the thread's next run would start from what must vanish.
    async with connection.transaction():
        cursor = await connection.execute(
            "select outcome, ready_pool, ready_count from end_run(%s, %s, %s, %s, %s::json, %s, %s)",
            (*fence.key, status, error, TEMPORARY_KEEP_S, fence.attempt),
        )
        rows = await cursor.fetchall()
        ended = rows[0][0] == "done"
        if ended and rollback:
            await connection.execute("select erase_run(%s, %s, %s)", fence.key)
    return ended, ready_by_pool((row[1], row[2]) for row in rows)


async def hand_over(connection: Connection, fences: Sequence[Fence]) -> tuple[list[Fence], set[Fence]]:
    """Give runs back as ready, at their newest checkpoint, by one statement. Returns those that were given back, and
    those that are still ours because somebody holds the row. The others were superseded, or have ended.

    It is no death, and after a new checkpoint the earlier ones are forgotten.
    """
    cursor = await connection.execute(
        f"""
        with held as materialized (
          select r.tenant, r.user_id, r.run_id from runs r {_MATCHING}
          where r.status = 'running' order by r.tenant, r.user_id, r.run_id for update of r skip locked)
        update runs r set status = 'pending', lease_owner = null, lease_expires_at = null,
               ready_at = clock_timestamp(), updated_at = clock_timestamp(),
               deaths = case when exists (
                 select 1 from checkpoints c where c.tenant = r.tenant and c.user_id = r.user_id
                 and c.thread_id = r.thread_id::text and c.run_id = r.run_id and c.attempt = r.attempt) then 0 else r.deaths end
        from held h where r.tenant = h.tenant and r.user_id = h.user_id and r.run_id = h.run_id
        returning r.tenant, r.user_id, r.run_id, r.attempt
        """,
        _columns(fences),
    )
    given = [Fence(RunKey(*row[:3]), row[3]) for row in await cursor.fetchall()]
    return given, await _still_running(connection, [fence for fence in fences if fence not in given])


async def give_back_lost(connection: Connection, owner: str, known: Sequence[Fence]) -> list[Fence]:
    """Give back what a claim of this owner took whose reply never came: nobody would renew it. ``known`` are the runs that
    the owner has. Returns what was given back; it counts as no death."""
    cursor = await connection.execute(
        """
        select r.tenant, r.user_id, r.run_id, r.attempt from runs r
        where r.status = 'running' and r.lease_owner = %s and not exists (
          select 1 from unnest(%s::text[], %s::text[], %s::uuid[], %s::int[]) f (tenant, user_id, run_id, attempt)
          where r.tenant = f.tenant and r.user_id = f.user_id and r.run_id = f.run_id and r.attempt = f.attempt)
        """,
        (owner, *_columns(known)),
    )
    lost = [Fence(RunKey(*row[:3]), row[3]) for row in await cursor.fetchall()]
    return (await hand_over(connection, lost))[0] if lost else []


def at(base: datetime, elapsed_s: float | None) -> datetime | None:
    """A time on the database's clock: a base read from it plus what a monotonic clock has measured since."""
    return None if elapsed_s is None else base + timedelta(seconds=elapsed_s)
