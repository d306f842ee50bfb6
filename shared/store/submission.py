"""Accepting a run: one transaction, after which it can no longer be lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from psycopg import AsyncConnection

from sandfleet.shared.db.group_commit import GroupCommit
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import Conflict, NotFound, SandfleetError, TooManyRequests
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S, CancelAction
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.ready import ReadyRuns

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
"""Classes of runs: a lower one is claimed first."""

_LARGE = 64 * 1024
"""Characters of a run's parameters that cost more to pack with others than their transaction costs alone."""


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


_SUBMIT_SEVERAL = """
select f.n, r.* from json_to_recordset(%s::json) f (
       n int, tenant text, user_id text, run_id uuid, thread_id uuid, create_thread boolean, temporary boolean,
       assistant_id uuid, graph_id text, kind text, pool text, run_class smallint, strategy text, kwargs text,
       base_metadata text, metadata text, delay_s double precision, timeout_s double precision, idempotency_key text,
       request_hash text, parent_run uuid, keep_temporary_s double precision),
  lateral submit_run(f.tenant, f.user_id, f.run_id, f.thread_id, f.create_thread, f.temporary, f.assistant_id, f.graph_id,
       f.kind, f.pool, f.run_class, f.strategy, f.kwargs::json, f.base_metadata::jsonb, f.metadata::jsonb, f.delay_s,
       f.timeout_s, f.idempotency_key, decode(f.request_hash, 'hex'), f.parent_run, f.keep_temporary_s) r
"""


async def submit(pool: Pool, submission: Submission) -> Accepted:
    """Accept a run. See `submit_on` for what it raises."""
    async with pool.connection() as connection:
        accepted = await submit_on(connection, submission)
    reach("submit.committed")
    return accepted


async def submit_on(connection: AsyncConnection[Any], submission: Submission) -> Accepted:
    """Accept a run on a connection of the caller's, whose transaction may hold several.

    Raises NotFound (no such thread or parent), Conflict (the thread is busy and the strategy is ``reject``, the parent is
    over, or the idempotency key was used for another body) and TooManyRequests (the tenant's queue is full).
    """
    cursor = await connection.execute(
        _SUBMIT, {**_parameters(submission), "request_hash": submission.request_hash}
    )
    row = await cursor.fetchone()
    assert row is not None
    answer = _answer(row)
    if isinstance(answer, SandfleetError):
        raise answer
    return answer


async def submit_together(
    connection: AsyncConnection[Any], submissions: Sequence[Submission]
) -> list[Accepted | SandfleetError]:
    """Accept runs of one tenant in one transaction, each for itself: the answers are in their order, and what `submit_on`
    raises for a run is its answer. None of them may interrupt others, whose rows would be locked in any order."""
    rows = [
        {
            "n": n,
            **_parameters(s),
            "request_hash": s.request_hash.hex() if s.request_hash is not None else None,
        }
        for n, s in enumerate(submissions)
    ]
    cursor = await connection.execute(_SUBMIT_SEVERAL, (orjson.dumps(rows).decode(),))
    answers = {n: _answer(row) for n, *row in await cursor.fetchall()}
    return [answers[n] for n in range(len(submissions))]


def _parameters(s: Submission) -> dict[str, Any]:
    return {
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
        "parent_run": s.parent_run,
        "keep_temporary_s": TEMPORARY_KEEP_S,
    }


def _answer(row: Sequence[Any]) -> Accepted | SandfleetError:
    outcome, run_id, thread_id, gate, created_at, metadata, stop, actions, woken, ended, attempts = row
    if outcome == "no_thread":
        return NotFound("Thread or assistant not found.")
    if outcome == "no_parent":
        return NotFound("The run that X-Parent-Run-Id names was not found.")
    if outcome == "parent_ended":
        return Conflict(
            "The parent run has ended, is being cancelled, or would be interrupted by this run: it gets no more children."
        )
    if outcome == "busy":
        return Conflict(
            "The thread is busy with another run. Wait for it, cancel it, or use multitask_strategy 'enqueue'."
        )
    if outcome == "queue_full":
        return TooManyRequests("Too many runs of this tenant are waiting. Try again later.", retry_after_s=5)
    if outcome == "key_reused":
        return Conflict(
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


class Submitter:
    """Accepts runs, those of one tenant that come at the same time in one transaction. One per event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = GroupCommit(self._submit)

    async def submit(self, submission: Submission) -> Accepted:
        """Accept a run. Raises what `submit_on` raises."""
        if submission.strategy in ("interrupt", "rollback") or len(submission.kwargs) > _LARGE:
            return await submit(self._pool, submission)
        answer = await self._together.do(submission.key.tenant, submission)
        if isinstance(answer, SandfleetError):
            raise answer
        return answer

    async def _submit(self, submissions: Sequence[Submission]) -> Sequence[Accepted | SandfleetError]:
        async with self._pool.connection() as connection:
            if len(submissions) > 1:
                answers = await submit_together(connection, submissions)
            else:
                answers = [await submit_on(connection, submissions[0])]
        reach("submit.committed")
        return answers
