"""Threads: reads, searches, changes and removal. Runs take threads elsewhere, in the gates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import Conflict, NotFound
from sandfleet.shared.ids import Owner
from sandfleet.shared.store.cancellation import TEMPORARY_KEEP_S, Cancelled, cancel_on
from sandfleet.shared.store.copying import CHECKPOINTS, STATES, copy_rows
from sandfleet.shared.store.undoing import settle_thread

SORT_COLUMNS = ("thread_id", "status", "created_at", "updated_at", "state_updated_at")

_MISSING = "Thread not found."
_COLUMNS = """t.thread_id, t.status, t.metadata::text as metadata, t.config::text as config,
  t.interrupts::text as interrupts, t.error::text as error, t.created_at, t.updated_at, t.state_updated_at"""
_NEWEST = """left join lateral (
  select n."values", n.refs from state_snapshots n
  where n.tenant = t.tenant and n.user_id = t.user_id and n.thread_id = t.thread_id::text and n.ns = ''
  order by n.seq desc limit 1) s on true"""
# One channel of the newest state as text. PostgreSQL reads no JSON that holds U+0000, which no filter can name either.
_CHANNEL = r"""case when s.refs->>%(key_{n})s is not null
  then (select b.body from state_blobs b where b.tenant = t.tenant and b.user_id = t.user_id
        and b.thread_id = t.thread_id::text and b.hash = decode(s.refs->>%(key_{n})s, 'hex'))
  else (replace(s."values"::text, '\u0000', '\ufffd')::json->%(key_{n})s)::text end"""
_EQUALS = r"""replace({channel}, '\u0000', '\ufffd')::jsonb = %(value_{n})s::jsonb"""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread. JSON values are texts; ``values`` and ``refs`` are of its newest state, None when it has none or when
    they were not asked for."""

    thread_id: UUID
    status: str
    metadata: str
    config: str
    interrupts: str
    error: str | None
    created_at: datetime
    updated_at: datetime
    state_updated_at: datetime
    values: str | None = None
    refs: str | None = None
    """JSON object: which channels of ``values`` are in ``state_blobs``, by the hash's hex."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What a search or a count looks for."""

    metadata: str | None = None
    """JSON text of an object that the thread's metadata must contain."""
    values: Mapping[str, str] | None = None
    """JSON text by channel that the newest state must equal."""
    status: str | None = None
    ids: Sequence[UUID] | None = None


async def get(pool: Pool, owner: Owner, thread_id: UUID) -> Thread:
    """One thread with its values. Raises NotFound."""
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Thread)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS}, s."values"::text as values, s.refs::text as refs from threads t {_NEWEST}
                where t.tenant = %s and t.user_id = %s and t.thread_id = %s""",
            (*owner, thread_id),
        )
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(_MISSING)
    return row


async def require(pool: Pool, owner: Owner, thread_id: UUID) -> str:
    """The JSON text of a thread's metadata, which names its graph. Raises NotFound."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select metadata::text from threads where tenant = %s and user_id = %s and thread_id = %s",
            (*owner, thread_id),
        )
        row = await cursor.fetchone()
    if row is None:
        raise NotFound(_MISSING)
    return str(row[0])


async def create(
    pool: Pool, owner: Owner, thread_id: UUID, *, metadata: str, return_existing: bool
) -> Thread:
    """Make a thread. Raises Conflict when the id is taken unless ``return_existing``, which returns the old one."""
    async with pool.connection() as connection:
        cursor = connection.cursor(row_factory=class_row(Thread))
        await cursor.execute(
            f"""insert into threads as t (tenant, user_id, thread_id, metadata) values (%s, %s, %s, %s::jsonb)
                on conflict do nothing returning {_COLUMNS}""",
            (*owner, thread_id, metadata),
        )
        made = await cursor.fetchone()
    if made is not None:
        return made
    if not return_existing:
        raise Conflict("A thread with this id exists already. Use another id, or if_exists 'do_nothing'.")
    return await get(pool, owner, thread_id)


async def merge_metadata(pool: Pool, owner: Owner, thread_id: UUID, metadata: str) -> None:
    """Lay the top-level keys of a JSON object over the thread's metadata. Raises NotFound."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """update threads set metadata = metadata || %s::jsonb, updated_at = clock_timestamp()
               where tenant = %s and user_id = %s and thread_id = %s returning 1""",
            (metadata, *owner, thread_id),
        )
        if not await cursor.fetchone():
            raise NotFound(_MISSING)


async def search(
    pool: Pool,
    owner: Owner,
    wanted: Filter,
    *,
    sort_by: str,
    descending: bool,
    limit: int,
    offset: int,
    with_values: bool,
) -> list[Thread]:
    """Threads that are not the hidden ones of stateless runs. ``sort_by`` is one of `SORT_COLUMNS`."""
    assert sort_by in SORT_COLUMNS
    direction = "desc" if descending else "asc"
    where, parameters = _where(owner, wanted)
    columns = f"""{_COLUMNS}, s."values"::text as values, s.refs::text as refs""" if with_values else _COLUMNS
    newest = _NEWEST if with_values or wanted.values else ""
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Thread)) as cursor:
        await cursor.execute(
            f"""select {columns} from threads t {newest} where {where}
                order by t.{sort_by} {direction}, t.thread_id limit %(limit)s offset %(offset)s""",
            {**parameters, "limit": limit, "offset": offset},
        )
        return await cursor.fetchall()


async def count(pool: Pool, owner: Owner, wanted: Filter) -> int:
    """How many threads a search would find."""
    where, parameters = _where(owner, wanted)
    newest = _NEWEST if wanted.values else ""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            f"select count(*) from threads t {newest} where {where}", parameters
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


def _where(owner: Owner, wanted: Filter) -> tuple[str, dict[str, Any]]:
    conditions = ["t.tenant = %(tenant)s", "t.user_id = %(user_id)s", "not t.temporary"]
    parameters: dict[str, Any] = {"tenant": owner.tenant, "user_id": owner.user_id}
    if wanted.metadata is not None:
        conditions.append("t.metadata @> %(metadata)s::jsonb")
        parameters["metadata"] = wanted.metadata
    if wanted.status is not None:
        conditions.append("t.status = %(status)s")
        parameters["status"] = wanted.status
    if wanted.ids is not None:
        conditions.append("t.thread_id = any(%(ids)s)")
        parameters["ids"] = list(wanted.ids)
    for n, (key, value) in enumerate((wanted.values or {}).items()):
        conditions.append(_EQUALS.format(n=n, channel=_CHANNEL.format(n=n)))
        parameters[f"key_{n}"] = key
        parameters[f"value_{n}"] = value
    return " and ".join(conditions), parameters


async def delete(pool: Pool, owner: Owner, thread_id: UUID) -> Cancelled:
    """Remove a thread and all that is its own; runs that are not over end first.

    Their descendants are cancelled. Returns whom to tell: an executor may still work on a run, which is superseded. Raises
    NotFound.
    """
    async with pool.connection() as connection, connection.transaction():
        if not await lock(connection, owner, thread_id):
            raise NotFound(_MISSING)
        cursor = await connection.execute(
            """select run_id from runs where tenant = %s and user_id = %s and thread_id = %s
               and status in ('pending', 'running')""",
            (*owner, thread_id),
        )
        active = [row[0] for row in await cursor.fetchall()]
        cancelled = await cancel_on(connection, owner, active, "interrupt")
        cursor = await connection.execute(
            "select run_id from runs where tenant = %s and user_id = %s and thread_id = %s and status = 'running'",
            (*owner, thread_id),
        )
        for (run_id,) in await cursor.fetchall():
            await connection.execute(
                "select end_run(%s, %s, %s, 'interrupted', null, %s)", (*owner, run_id, TEMPORARY_KEEP_S)
            )
        await connection.execute("select erase_thread(%s, %s, %s)", (*owner, thread_id))
        return cancelled.without(active)


async def of_assistant(pool: Pool, owner: Owner, assistant_id: UUID) -> list[UUID]:
    """The threads whose metadata names an assistant."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            """select thread_id from threads where tenant = %s and user_id = %s
               and metadata @> jsonb_build_object('assistant_id', %s::text)""",
            (*owner, assistant_id),
        )
        return [row[0] for row in await cursor.fetchall()]


async def lock(connection: AsyncConnection[Any], owner: Owner, thread_id: UUID) -> bool:
    """Lock tenant and thread, in this order, for the rest of the transaction; False when there is no such thread."""
    await connection.execute("select 1 from tenants where tenant = %s for update", (owner.tenant,))
    cursor = await connection.execute(
        "select 1 from threads where tenant = %s and user_id = %s and thread_id = %s for update",
        (*owner, thread_id),
    )
    return await cursor.fetchone() is not None


async def copy(pool: Pool, owner: Owner, thread_id: UUID, new_id: UUID) -> None:
    """Copy a thread with its checkpoints and states, ids kept, without its runs. Raises NotFound."""
    async with pool.connection() as connection, connection.transaction():
        # One snapshot for all tables: a run may be writing.
        await connection.execute("set transaction isolation level repeatable read")
        cursor = await connection.execute(
            """with source as (select * from threads where tenant = %s and user_id = %s and thread_id = %s)
               insert into threads (tenant, user_id, thread_id, metadata, config, status, interrupts, error)
               select tenant, user_id, %s, metadata, config, case when status = 'busy' then 'idle' else status end,
                      interrupts, error
               from source returning (select status = 'busy' from source)""",
            (*owner, thread_id, new_id),
        )
        row = await cursor.fetchone()
        if row is None:
            raise NotFound(_MISSING)
        await copy_rows(connection, owner, str(thread_id), str(new_id), CHECKPOINTS | STATES)
        if row[0]:
            await settle_thread(connection, owner, new_id)  # the run that is at work stays behind
