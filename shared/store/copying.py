"""Copying what belongs to a thread to another one, table by table; ids within it stay as they are."""

from collections.abc import Mapping
from typing import Any

from psycopg import AsyncConnection

from sandfleet.shared.ids import Owner

CHECKPOINTS = {
    "checkpoint_blobs": "ns, channel, version, type, body",
    "checkpoint_writes": "ns, checkpoint_id, task_id, slot, run_id, path, type, body",
    "checkpoints": "ns, checkpoint_id, parent_id, run_id, attempt, metadata, blobs, type, body",
}
"""The tables that LangGraph goes on from, each with its columns besides those that say whose and where."""

STATES = {
    "state_blobs": "hash, body",
    "state_snapshots": (
        'ns, checkpoint_id, run_id, parent_id, "values", refs, next, tasks, parent_results, metadata, created_at'
    ),
}
"""The tables that readers without LangGraph are shown."""

_ORDERED = ("checkpoints", "state_snapshots")  # by ``seq``, which the copies get anew


async def copy_rows(
    connection: AsyncConnection[Any], owner: Owner, source: str, target: str, tables: Mapping[str, str]
) -> None:
    """Copy the rows of one thread of an owner to another thread of theirs; nothing if there are none."""
    for table, columns in tables.items():
        order = " order by seq" if table in _ORDERED else ""
        await connection.execute(
            f"""insert into {table} (tenant, user_id, thread_id, {columns}) select tenant, user_id, %s, {columns}
                from {table} where tenant = %s and user_id = %s and thread_id = %s{order}""".encode(),
            (target, *owner, source),
        )
