"""The executor's side of a run: claim, renew, finish, hand over, and the sweep of what others left.

Every statement names (run, attempt), never the owner: by owner, a claim whose reply was lost would live for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

import orjson
from psycopg import AsyncConnection

from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool
from sandfleet.shared.store.suspects import deaths_of_a_suspect
from sandfleet.shared.store.undoing import settle_interrupts, undo_run

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
    created_at: datetime
    """When it was accepted, or was to begin at the earliest."""
    ready_at: datetime | None
    """When it became ready the last time."""


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
               c.o_resumes, c.o_head, r.created_at, r.ready_at
        from claim_runs(%s, %s, %s, %s, %s, %s, %s) c, lateral (select (c.o_run).*) r
        """,
        (pool, owner, lease_s, limit, longest_waiting, suspect, suspects),
    )
    rows = await cursor.fetchall()
    if rows:
        reach("run.claimed")
    return [ClaimedRun(Fence(RunKey(row[0], row[1], row[2]), row[3]), *row[4:]) for row in rows]


async def advance_clocks(connection: Connection, pool: str, newest: Mapping[int, int]) -> None:
    """Move the virtual clocks of a pool to the start times just claimed, ``{class: vtime}``; never back."""
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
    """None makes them what the newest state says."""
    rollback: bool = False
    """Erase the run and its checkpoints in the same transaction."""
    prepared_at: datetime | None = None
    first_model_request_at: datetime | None = None
    first_output_at: datetime | None = None

    @property
    def stands_alone(self) -> bool:
        """Whether it takes more than one statement, and so a transaction of its own."""
        return self.rollback or self.interrupts is None


_FINISH = """
select f.n, r.outcome, r.ready_pool, r.ready_count
from (select * from json_to_recordset(%s::json) each (
         n int, tenant text, user_id text, run_id uuid, attempt int, status text, error text, output text, partial text,
         thread_status text, interrupts text, events text, prepared_at timestamptz, first_model_request_at timestamptz,
         first_output_at timestamptz)
       order by tenant, user_id, run_id) f,  -- runs are locked in the order of their keys, as everywhere
  lateral finish_run(f.tenant, f.user_id, f.run_id, f.attempt, f.status, f.error::json, f.output::json, f.partial::json,
       f.thread_status, f.interrupts::json, f.events::json, %s, f.prepared_at, f.first_model_request_at,
       f.first_output_at) r
"""


async def finish(connection: Connection, fence: Fence, ending: Ending) -> tuple[bool, ReadyRuns]:
    """The terminal transaction. Returns whether the run ended by this attempt (now, or before, when the reply of an
    earlier call was lost) and which pools got ready runs through it; if the reply was lost, which have any. A run that was
    to be erased and is gone counts as ended by this attempt."""
    if not ending.stands_alone:
        return (await finish_together(connection, [(fence, ending)]))[0]
    reach("finish.before")
    async with connection.transaction():
        mine, ready = (await _finish(connection, [(fence, ending)]))[0]
        if not ending.rollback:
            if mine:
                await settle_interrupts(connection, fence.key.owner, [fence.key.run_id])
        elif mine:
            await undo_run(connection, fence.key)
        elif not await _exists(connection, fence.key):
            mine, ready = True, await _pools_with_ready(connection)
    reach("finish.committed")
    return mine, ready


async def finish_together(
    connection: Connection, endings: Sequence[tuple[Fence, Ending]]
) -> list[tuple[bool, ReadyRuns]]:
    """Several terminal transactions in one; the answers are in the order of ``endings``, as `finish` gives them.

    Give it runs of one tenant only, since it holds the tenant's row until it commits, and none that stands alone.
    """
    # The tenant's lock is held until the transaction ends. A statement on its own ends it in the server; a block would
    # hold it over two more round trips of a busy process, and serialise the tenant's runs behind them.
    reach("finish.before")
    answers = await _finish(connection, endings)
    reach("finish.committed")
    return answers


async def _finish(
    connection: Connection, endings: Sequence[tuple[Fence, Ending]]
) -> list[tuple[bool, ReadyRuns]]:
    rows = [
        {
            "n": n,
            "tenant": fence.key.tenant,
            "user_id": fence.key.user_id,
            "run_id": fence.key.run_id,
            "attempt": fence.attempt,
            "status": ending.status,
            "error": ending.error,
            "output": ending.output,
            "partial": ending.partial,
            "thread_status": ending.thread_status,
            "interrupts": ending.interrupts,
            "events": ending.events,
            "prepared_at": ending.prepared_at,
            "first_model_request_at": ending.first_model_request_at,
            "first_output_at": ending.first_output_at,
        }
        for n, (fence, ending) in enumerate(endings)
    ]
    cursor = await connection.execute(_FINISH, (orjson.dumps(rows).decode(), TEMPORARY_KEEP_S))
    outcomes: list[list[Any]] = [[] for _ in endings]
    for n, *row in await cursor.fetchall():
        outcomes[n].append(row)
    untold = await _pools_with_ready(connection) if any(found[0][0] == "mine" for found in outcomes) else {}
    return [
        (
            found[0][0] != "superseded",
            untold if found[0][0] == "mine" else ready_by_pool((row[1], row[2]) for row in found),
        )
        for found in outcomes
    ]


async def _exists(connection: Connection, key: RunKey) -> bool:
    cursor = await connection.execute(
        "select 1 from runs where tenant = %s and user_id = %s and run_id = %s", key
    )
    return await cursor.fetchone() is not None


async def _pools_with_ready(connection: Connection) -> ReadyRuns:
    """Pools that have ready runs, one for each: what the lost reply told is not known any more, and an executor that is
    woken takes as many as it has slots for."""
    cursor = await connection.execute(
        """select p.pool, 1 from (select distinct pool from executors) p where exists (
             select 1 from runs r where r.status = 'pending' and r.gate is null and r.pool = p.pool)"""
    )
    return ready_by_pool(await cursor.fetchall())


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
            await undo_run(connection, fence.key)
        elif ended:
            await settle_interrupts(connection, fence.key.owner, [fence.key.run_id])
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
