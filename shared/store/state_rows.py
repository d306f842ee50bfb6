"""Reading a thread's states in the shape of the SDK's ``ThreadState``, from the JSON that executors have stored."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import orjson

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Owner
from sandfleet.shared.json_text import contains
from sandfleet.shared.store import thread_values

State = dict[str, Any]

_PAGE = 50
# The checkpoint's own metadata is fuller: it has the run's, too.
_SELECT = """
select s.seq, s.ns, s.checkpoint_id, s.parent_id, s."values"::text, s.refs::text, s.next::text, s.tasks::text,
       coalesce(c.metadata, s.metadata)::text, s.created_at, n.results
from state_snapshots s
left join lateral (
  select n.parent_results::text as results from state_snapshots n
  where n.tenant = s.tenant and n.user_id = s.user_id and n.thread_id = s.thread_id and n.ns = s.ns and n.seq > s.seq
    and n.parent_id = s.checkpoint_id and n.parent_results::text <> '{}' order by n.seq limit 1) n on true
left join checkpoints c on c.tenant = s.tenant and c.user_id = s.user_id and c.thread_id = s.thread_id
  and c.ns = s.ns and c.checkpoint_id = s.checkpoint_id
where s.tenant = %(tenant)s and s.user_id = %(user_id)s and s.thread_id = %(thread_id)s and s.ns = %(ns)s
  and (%(checkpoint_id)s::text is null or s.checkpoint_id = %(checkpoint_id)s)
  and (%(before)s::text is null or s.seq < (select b.seq from state_snapshots b where b.tenant = s.tenant
       and b.user_id = s.user_id and b.thread_id = s.thread_id and b.ns = s.ns and b.checkpoint_id = %(before)s))
  and (%(last)s::bigint is null or s.seq < %(last)s)
order by s.seq desc limit %(page)s
"""


def empty() -> State:
    """The state of a thread that has none yet."""
    return {
        "values": {},
        "next": [],
        "tasks": [],
        "metadata": None,
        "created_at": None,
        "checkpoint": None,
        "parent_checkpoint": None,
        "checkpoint_id": None,
        "parent_checkpoint_id": None,
        "interrupts": [],
    }


async def newest(
    pool: Pool, owner: Owner, thread_id: UUID, ns: str = "", *, subgraphs: bool = False
) -> State | None:
    """The newest state of a thread, or of a subgraph by its namespace; None when there is none.

    With ``subgraphs`` the ``state`` of each task that is a subgraph is filled with its newest state.
    """
    found = await history(pool, owner, thread_id, ns=ns, limit=1)
    return await _with_subgraphs(pool, owner, thread_id, found, subgraphs)


async def by_id(
    pool: Pool,
    owner: Owner,
    thread_id: UUID,
    checkpoint_id: str,
    ns: str = "",
    *,
    subgraphs: bool = False,
) -> State | None:
    """The state at a checkpoint; None when the thread has no such checkpoint."""
    found = await history(pool, owner, thread_id, ns=ns, limit=1, checkpoint_id=checkpoint_id)
    return await _with_subgraphs(pool, owner, thread_id, found, subgraphs)


async def history(
    pool: Pool,
    owner: Owner,
    thread_id: UUID,
    *,
    ns: str = "",
    limit: int = 10,
    before: str | None = None,
    checkpoint_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[State]:
    """States of a thread, newest first: those older than the checkpoint ``before``, only the one at ``checkpoint_id``,
    those whose metadata contains ``metadata``. Ids that the thread does not have find nothing.
    """
    if any("\x00" in text for text in (ns, before or "", checkpoint_id or "")):
        return []
    found: list[State] = []
    last = None
    # PostgreSQL cannot look into JSON that holds U+0000, so metadata is compared here.
    page = _PAGE if metadata else limit
    while len(found) < limit:
        async with pool.connection() as connection:
            cursor = await connection.execute(
                _SELECT,
                {
                    "tenant": owner.tenant,
                    "user_id": owner.user_id,
                    "thread_id": str(thread_id),
                    "ns": ns,
                    "checkpoint_id": checkpoint_id or None,
                    "before": before or None,
                    "last": last,
                    "page": page,
                },
            )
            rows = await cursor.fetchall()
            wanted = [row for row in rows if not metadata or contains(orjson.loads(row[8]), metadata)]
            wanted = wanted[: limit - len(found)]
            values = await thread_values.complete(
                connection, owner, [(thread_id, row[4], row[5]) for row in wanted]
            )
        found += [_state(thread_id, row, text) for row, text in zip(wanted, values, strict=True)]
        if len(rows) < page:
            break
        last = rows[-1][0]
    return found


def _state(thread_id: UUID, row: tuple[Any, ...], values: str | None) -> State:
    _, ns, checkpoint_id, parent_id, _, _, following, tasks, metadata, created_at, results = row

    def checkpoint(of: str | None) -> dict[str, str] | None:
        return (of and {"thread_id": str(thread_id), "checkpoint_ns": ns, "checkpoint_id": of}) or None

    task_list = orjson.loads(tasks)
    if results is not None:
        came_to = orjson.loads(results)
        for task in task_list:
            task["result"] = came_to.get(task["id"], task["result"])
    return {
        "values": orjson.loads(values or "{}"),
        "next": orjson.loads(following),
        "tasks": task_list,
        "metadata": orjson.loads(metadata),
        "created_at": created_at,
        "checkpoint": checkpoint(checkpoint_id),
        "parent_checkpoint": checkpoint(parent_id),
        "checkpoint_id": checkpoint_id,
        "parent_checkpoint_id": parent_id,
        "interrupts": [interrupt for task in task_list for interrupt in task["interrupts"]],
    }


async def _with_subgraphs(
    pool: Pool, owner: Owner, thread_id: UUID, found: list[State], subgraphs: bool
) -> State | None:
    if not found:
        return None
    if subgraphs:
        for task in found[0]["tasks"]:
            if task["checkpoint"] is not None:
                task["state"] = await newest(
                    pool, owner, thread_id, task["checkpoint"]["checkpoint_ns"], subgraphs=True
                )
                task["checkpoint"] = None
    return found[0]
