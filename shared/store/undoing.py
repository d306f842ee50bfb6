"""Undoing a run, and what a thread's status and interrupts are when nobody who ends its run has told them."""

from collections.abc import Collection
from typing import Any
from uuid import UUID

import orjson
from psycopg import AsyncConnection

from sandfleet.shared.ids import Owner, RunKey

Connection = AsyncConnection[Any]


async def undo_run(connection: Connection, key: RunKey) -> None:
    """Erase a run that is over with all that it wrote, in the caller's transaction: its thread is as it was before, once no
    other run is active on it. Nothing happens when there is no such run."""
    cursor = await connection.execute(
        "select thread_id from runs where tenant = %s and user_id = %s and run_id = %s", key
    )
    row = await cursor.fetchone()
    if row is not None:
        await connection.execute("select erase_run(%s, %s, %s)", key)
        await _settle_interrupts(connection, key.owner, row[0])


async def settle_thread(connection: Connection, owner: Owner, thread_id: UUID) -> None:
    """Make the thread's status and interrupts what its last run and its newest state say, and drop blobs that no state
    names. Does nothing while a run is active: its end will do it, and its writes may name a blob again."""
    await connection.execute("select settle_thread(%s, %s, %s)", (*owner, thread_id))
    await _settle_interrupts(connection, owner, thread_id)


async def settle_interrupts(connection: Connection, owner: Owner, run_ids: Collection[UUID]) -> None:
    """Make the interrupts of the threads of runs that are over what their newest states say: a run that went on from a question
    and was ended from outside has left it behind, or not. Does nothing on threads with an active run."""
    cursor = await connection.execute(
        "select distinct thread_id from runs where tenant = %s and user_id = %s and run_id = any(%s)",
        (*owner, list(run_ids)),
    )
    for (thread_id,) in await cursor.fetchall():
        await _settle_interrupts(connection, owner, thread_id)


async def _settle_interrupts(connection: Connection, owner: Owner, thread_id: UUID) -> None:
    scope = {"tenant": owner.tenant, "user_id": owner.user_id, "thread": str(thread_id)}
    cursor = await connection.execute(
        """select tasks::text from state_snapshots
           where tenant = %(tenant)s and user_id = %(user_id)s and thread_id = %(thread)s and ns = ''
           order by seq desc limit 1""",
        scope,
    )
    newest = await cursor.fetchone()
    # Not in PostgreSQL, which cannot look into JSON that holds U+0000.
    tasks = orjson.loads(newest[0]) if newest else []
    interrupts = {task["id"]: task["interrupts"] for task in tasks if task.get("interrupts")}
    await connection.execute(
        """update threads set interrupts = %(interrupts)s::json
           where tenant = %(tenant)s and user_id = %(user_id)s and thread_id = %(thread)s::uuid and not exists (
             select 1 from runs where tenant = %(tenant)s and user_id = %(user_id)s and thread_id = %(thread)s::uuid
               and status in ('pending', 'running'))""",
        {**scope, "interrupts": orjson.dumps(interrupts).decode()},
    )
