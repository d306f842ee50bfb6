"""Cancelling: committed in PostgreSQL first; a signal to the executor may then be lost without harm."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Owner, RunKey
from sandfleet.shared.store.ended import EndedRun
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool
from sandfleet.shared.store.undoing import settle_interrupts

TEMPORARY_KEEP_S = 60.0
"""How long a stateless run's thread stays readable after the run, so that a broken response can be fetched again."""

CancelAction = Literal["interrupt", "rollback"]


class Cancelled(NamedTuple):
    """What a cancellation did: runs that their executors must be told to end, each with how; runs that waited and are over
    now; the pools of runs that became ready by that; and those of the ended ones that are still there, for their watchers."""

    stop: dict[UUID, CancelAction]
    ended: list[UUID]
    ready: ReadyRuns
    announce: list[EndedRun]

    def without(self, erased: Collection[UUID]) -> "Cancelled":
        """The same after these runs were erased, too."""
        return self._replace(announce=[run for run in self.announce if run.run_id not in erased])


async def cancel_on(
    connection: AsyncConnection[Any], owner: Owner, run_ids: Sequence[UUID], action: CancelAction
) -> Cancelled:
    """Ask runs and all their descendants to end; descendants are interrupted, whatever the action is for the others.

    All locks are taken by one statement: tenant, threads, runs. Runs that are over are passed by.
    """
    cursor = await connection.execute(
        "select * from cancel_runs(%s, %s, %s, %s, %s)", (*owner, action, TEMPORARY_KEEP_S, list(run_ids))
    )
    rows = await cursor.fetchall()
    if announce := [EndedRun(row[2], row[5], None) for row in rows if row[5] is not None]:
        await settle_interrupts(connection, owner, [run.run_id for run in announce])
    return Cancelled(
        {row[0]: row[1] for row in rows if row[0] is not None},
        [row[2] for row in rows if row[2] is not None],
        ready_by_pool((row[3], row[4]) for row in rows),
        announce,
    )


async def request_cancel(pool: Pool, key: RunKey, action: CancelAction) -> Cancelled:
    """Ask a run to end. Raises NotFound when there is no such run or it was over before."""
    async with pool.connection() as connection, connection.transaction():
        cancelled = await cancel_on(connection, key.owner, [key.run_id], action)
    if key.run_id not in cancelled.stop and key.run_id not in cancelled.ended:
        raise NotFound("Run not found, or it has ended already.")
    return cancelled
