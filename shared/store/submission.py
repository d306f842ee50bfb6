"""Accepting a run: one transaction, after which it can no longer be lost."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import Conflict, NotFound, TooManyRequests
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S, CancelAction
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.ready import ReadyRuns

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
"""Classes of runs: a lower one is claimed first."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A run as a caller asks for it. JSON bodies are texts, so that what PostgreSQL's jsonb cannot hold survives."""

    key: RunKey
    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    pool: str
    kwargs: str
    """JSON object with what the executor needs: input, command, config, …"""
    base_metadata: str = "{}"
    """JSON object of the assistant's metadata; the thread's and then ``metadata`` are laid over it."""
    metadata: str = "{}"
    kind: str = "run"
    run_class: int = STANDARD
    strategy: str = "enqueue"
    """``reject``, ``enqueue``, ``interrupt`` or ``rollback``: what happens when the thread is taken."""
    create_thread: bool = False
    temporary: bool = False
    """The thread is made for this run alone and goes away after it."""
    delay_s: float = 0.0
    timeout_s: float = 3600.0
    parent_run: UUID | None = None
    """A run of the same owner: cancelling it cancels this one."""
    idempotency_key: str | None = None
    request_hash: bytes | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """What became of a submission.

    ``gate`` is what the run waits for (None: an executor, so one should be woken). ``replayed`` means that the
    idempotency key had made this run before; ``metadata`` is None then. ``stop`` are runs that must be told to
    stop for the thread's sake, each with how; ``ended`` those that had not begun and are over now, for their watchers;
    ``ready`` the pools of runs that became ready because others ended, or of a replayed one that nobody has taken yet.
    """

    run_id: UUID
    thread_id: UUID
    gate: str | None
    created_at: datetime
    metadata: dict[str, Any] | None
    replayed: bool
    stop: dict[UUID, CancelAction]
    ready: ReadyRuns
    ended: list[EndedRun]


_SUBMIT = """
select * from submit_run(
  %(tenant)s, %(user_id)s, %(run_id)s, %(thread_id)s, %(create_thread)s, %(temporary)s,
  %(assistant_id)s, %(graph_id)s, %(kind)s, %(pool)s, %(run_class)s::smallint, %(strategy)s,
  %(kwargs)s::json, %(base_metadata)s::jsonb, %(metadata)s::jsonb, %(delay_s)s, %(timeout_s)s,
  %(idempotency_key)s, %(request_hash)s, %(parent_run)s, %(keep_temporary_s)s)
"""


async def submit(pool: Pool, submission: Submission) -> Accepted:
    """Accept a run. See `submit_on` for what it raises."""
    async with pool.connection() as connection:
        accepted = await submit_on(connection, submission)
    reach("submit.committed")
    return accepted


async def submit_on(connection: AsyncConnection[Any], s: Submission) -> Accepted:
    """Accept a run on a connection of the caller's, whose transaction may hold several.

    Raises NotFound (no such thread or parent), Conflict (the thread is busy and the strategy is ``reject``, the parent is
    over, or the idempotency key was used for another body) and TooManyRequests (the tenant's queue is full).
    """
    cursor = await connection.execute(
        _SUBMIT,
        {
            "tenant": s.key.tenant,
            "user_id": s.key.user_id,
            "run_id": s.key.run_id,
            "thread_id": s.thread_id,
            "create_thread": s.create_thread,
            "temporary": s.temporary,
            "assistant_id": s.assistant_id,
            "graph_id": s.graph_id,
            "kind": s.kind,
            "pool": s.pool,
            "run_class": s.run_class,
            "strategy": s.strategy,
            "kwargs": s.kwargs,
            "base_metadata": s.base_metadata,
            "metadata": s.metadata,
            "delay_s": float(s.delay_s),
            "timeout_s": float(s.timeout_s),
            "idempotency_key": s.idempotency_key,
            "request_hash": s.request_hash,
            "parent_run": s.parent_run,
            "keep_temporary_s": TEMPORARY_KEEP_S,
        },
    )
    row = await cursor.fetchone()
    assert row is not None
    outcome, run_id, thread_id, gate, created_at, metadata, stop, actions, woken, ended, attempts = row
    if outcome == "no_thread":
        raise NotFound("Thread or assistant not found.")
    if outcome == "no_parent":
        raise NotFound("The run that X-Parent-Run-Id names was not found.")
    if outcome == "parent_ended":
        raise Conflict(
            "The parent run has ended, is being cancelled, or would be interrupted by this run: it gets no more children."
        )
    if outcome == "busy":
        raise Conflict(
            "The thread is busy with another run. Wait for it, cancel it, or use multitask_strategy 'enqueue'."
        )
    if outcome == "queue_full":
        raise TooManyRequests("Too many runs of this tenant are waiting. Try again later.", retry_after_s=5)
    if outcome == "key_reused":
        raise Conflict(
            "This Idempotency-Key was used for a different request. Use a new key for a new request."
        )
    return Accepted(
        run_id,
        thread_id,
        gate,
        created_at,
        metadata,
        outcome == "replayed",
        dict(zip(stop or (), actions or (), strict=True)),
        Counter(woken or ()),
        [EndedRun(*each, None) for each in zip(ended or (), attempts or (), strict=True)],
    )
