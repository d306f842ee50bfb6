"""Cancelling: committed in PostgreSQL first; a signal to the executor may then be lost without harm."""

from typing import Literal

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool

TEMPORARY_KEEP_S = 60.0
"""How long a stateless run's thread stays readable after the run, so that a broken response can be fetched again."""

CancelAction = Literal["interrupt", "rollback"]


async def request_cancel(
    pool: Pool, key: RunKey, action: CancelAction
) -> tuple[Literal["ended", "requested"], ReadyRuns]:
    """Ask a run to end.

    ``ended``: it was pending and is over now; the second value says which pools got ready runs through it.
    ``requested``: an executor has it and will end it; the caller should set the cancel key.
    Raises NotFound when there is no such run or it was over before.
    """
    async with pool.connection() as connection, connection.transaction():
        cursor = await connection.execute(
            """update runs set cancel_action = %s where tenant = %s and user_id = %s and run_id = %s and status = 'running'
               returning 1""",
            (action, *key),
        )
        if await cursor.fetchone():
            return "requested", {}
        cursor = await connection.execute(
            "select outcome, ready_pool, ready_count from end_run(%s, %s, %s, 'interrupted', null, %s)",
            (*key, TEMPORARY_KEEP_S),
        )
        rows = await cursor.fetchall()
        if rows[0][0] != "done":
            raise NotFound("Run not found, or it has ended already.")
        if action == "rollback":
            await connection.execute("select erase_run(%s, %s, %s)", key)
        return "ended", ready_by_pool((row[1], row[2]) for row in rows)
