"""Deleting and thinning out the checkpoints of whole threads and runs. The caller brings the transaction."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection

from sandfleet.shared.ids import Owner

Connection = AsyncConnection[Any]

_UNUSED_BLOBS = """
delete from checkpoint_blobs b where b.tenant = %s and b.user_id = %s and b.thread_id = any(%s) and not exists (
  select 1 from checkpoints c, json_each_text(c.blobs) named
  where c.tenant = b.tenant and c.user_id = b.user_id and c.thread_id = b.thread_id and c.ns = b.ns
    and named.key = b.channel and named.value = b.version)
"""


async def delete_threads(connection: Connection, owner: Owner, thread_ids: Sequence[str]) -> None:
    """Delete all checkpoints, writes and channel values of these threads."""
    for table in ("checkpoint_writes", "replaced_writes", "checkpoint_blobs", "checkpoints"):
        await connection.execute(
            f"delete from {table} where tenant = %s and user_id = %s and thread_id = any(%s)".encode(),
            (*owner, list(thread_ids)),
        )


async def delete_for_runs(connection: Connection, owner: Owner, run_ids: Sequence[UUID]) -> None:
    """Delete the checkpoints that these runs wrote, with their writes and what no other checkpoint refers to."""
    await _delete_checkpoints(
        connection,
        owner,
        "select c.tenant, c.user_id, c.thread_id, c.ns, c.checkpoint_id from checkpoints c"
        " where c.tenant = %s and c.user_id = %s and c.run_id = any(%s)",
        list(run_ids),
    )


async def keep_latest(connection: Connection, owner: Owner, thread_ids: Sequence[str]) -> None:
    """Delete all checkpoints of these threads but the newest per namespace.

    A namespace with channels that are stored as differences (``DeltaChannel``, known by its counters in the metadata)
    keeps the ancestors of the newest checkpoint too: the channels are rebuilt from their writes.
    """
    await _delete_checkpoints(
        connection,
        owner,
        """
        with recursive mine as materialized (
          select c.tenant, c.user_id, c.thread_id, c.ns, c.checkpoint_id, c.parent_id, c.seq,
                 c.metadata::text like '%%"counters_since_delta_snapshot"%%' as by_difference
          from checkpoints c where c.tenant = %s and c.user_id = %s and c.thread_id = any(%s)
        ), kept as (
          (select distinct on (m.thread_id, m.ns) m.thread_id, m.ns, m.checkpoint_id, m.parent_id
           from mine m order by m.thread_id, m.ns, m.seq desc)
          union
          select m.thread_id, m.ns, m.checkpoint_id, m.parent_id
          from kept k join mine m on m.thread_id = k.thread_id and m.ns = k.ns and m.checkpoint_id = k.parent_id
          where exists (select 1 from mine d where d.thread_id = k.thread_id and d.ns = k.ns and d.by_difference))
        select m.tenant, m.user_id, m.thread_id, m.ns, m.checkpoint_id from mine m
        where (m.thread_id, m.ns, m.checkpoint_id) not in (select k.thread_id, k.ns, k.checkpoint_id from kept k)
        """,
        list(thread_ids),
    )


async def _delete_checkpoints(
    connection: Connection, owner: Owner, chosen: str, parameter: Sequence[Any]
) -> None:
    """Delete the checkpoints whose keys ``chosen`` selects, their writes, and the channel values that nothing uses then."""
    cursor = await connection.execute(
        f"""
        with chosen as materialized ({chosen}),
        writes as (delete from checkpoint_writes w using chosen x where w.tenant = x.tenant and w.user_id = x.user_id
                   and w.thread_id = x.thread_id and w.ns = x.ns and w.checkpoint_id = x.checkpoint_id),
        replaced as (delete from replaced_writes w using chosen x where w.tenant = x.tenant and w.user_id = x.user_id
                     and w.thread_id = x.thread_id and w.ns = x.ns and w.checkpoint_id = x.checkpoint_id)
        delete from checkpoints c using chosen x where c.tenant = x.tenant and c.user_id = x.user_id
          and c.thread_id = x.thread_id and c.ns = x.ns and c.checkpoint_id = x.checkpoint_id
        returning c.thread_id
        """.encode(),
        (*owner, parameter),
    )
    threads = sorted({thread_id for (thread_id,) in await cursor.fetchall()})
    await connection.execute(_UNUSED_BLOBS, (*owner, threads))
