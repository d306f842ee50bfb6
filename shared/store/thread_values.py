"""The values of a thread as JSON text, with the large ones put back that are stored apart."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson
from psycopg import AsyncConnection

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Owner

Stored = tuple[UUID, str | None, str | None]
"""Thread, its state's ``values`` and ``refs`` as texts; None when it has no state."""


async def newest(pool: Pool, owner: Owner, thread_id: UUID, checkpoint_id: str | None = None) -> str | None:
    """The values at a checkpoint, or at the newest one; None when there is none."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select "values"::text, refs::text from state_snapshots
               where tenant = %(tenant)s and user_id = %(user_id)s and thread_id = %(thread_id)s and ns = ''
                 and (%(checkpoint_id)s::text is null or checkpoint_id = %(checkpoint_id)s)
               order by seq desc limit 1""",
            {
                "tenant": owner.tenant,
                "user_id": owner.user_id,
                "thread_id": str(thread_id),
                "checkpoint_id": checkpoint_id,
            },
        )
        row = await cursor.fetchone()
        if row is None:
            return None
        return (await complete(connection, owner, [(thread_id, row[0], row[1])]))[0]


async def complete(
    connection: AsyncConnection[Any], owner: Owner, states: Sequence[Stored]
) -> list[str | None]:
    """The values of each state, with all that its ``refs`` name put back, by one query for all."""
    refs: list[dict[str, str]] = [orjson.loads(each) if each else {} for _, _, each in states]
    wanted = {
        (str(state[0]), digest) for state, each in zip(states, refs, strict=True) for digest in each.values()
    }
    if not wanted:
        return [values for _, values, _ in states]
    threads, digests = zip(*wanted, strict=True)
    cursor = await connection.execute(
        """select b.thread_id, encode(b.hash, 'hex'), b.body from state_blobs b
           join unnest(%s::text[], %s::text[]) w (thread_id, digest)
             on b.thread_id = w.thread_id and b.hash = decode(w.digest, 'hex')
           where b.tenant = %s and b.user_id = %s""",
        (list(threads), list(digests), *owner),
    )
    bodies = {(thread, digest): body for thread, digest, body in await cursor.fetchall()}
    completed: list[str | None] = []
    for (thread_id, values, _), each in zip(states, refs, strict=True):
        if values is None or not each:
            completed.append(values)
            continue
        whole = orjson.loads(values)
        for channel, digest in each.items():
            whole[channel] = orjson.Fragment(bodies[str(thread_id), digest])
        completed.append(orjson.dumps(whole).decode())
    return completed
