"""Sandboxes without a run: what PostgreSQL knows of them. ``db/versions/0003_sandboxes.sql`` has the rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Fence, Owner, RunKey

Connection = AsyncConnection[Any]

HOST_GONE_S = 60.0
"""A host that has been silent for so long, and does not answer, has lost its sandboxes."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox whose time is not over. ``metadata`` is JSON text."""

    sandbox_id: UUID
    template: str
    metadata: str
    generation: int
    """1 for the first; each loss and each restore begins another."""
    begins_with: UUID | None
    """The snapshot that it was to begin with."""
    restored: UUID | None
    """The snapshot that this generation began with."""
    lost: str | None
    """Why the generation before this one ended."""
    told: bool
    """Whether a caller has heard of that."""
    created_at: datetime
    expires_at: datetime
    host_id: str | None
    known: str | None
    """The host's id of it; None before it is made."""
    address: str | None
    remote: str | None
    host_here: bool
    """Whether its host has been heard of lately."""
    now: float
    """Epoch seconds of the database's clock."""
    expires: float
    """The same clock when its time is over."""


_SELECT = f"""
  select s.sandbox_id, s.template, s.metadata::text as metadata, s.generation, s.begins_with, s.restored, s.lost, s.told,
    s.created_at, s.expires_at, p.host_id, p.sandbox_id as known, h.address, h.remote,
    coalesce(h.heartbeat_at > clock_timestamp() - make_interval(secs => {HOST_GONE_S}), false) as host_here,
    extract(epoch from clock_timestamp())::float8 as now, extract(epoch from s.expires_at)::float8 as expires
  from sandboxes s
  left join placements p on p.tenant = s.tenant and p.user_id = s.user_id and p.run_id = s.sandbox_id
  left join hosts h on h.host_id = p.host_id
  where s.tenant = %(tenant)s and s.user_id = %(user_id)s and s.expires_at > clock_timestamp()"""

_NOT_BEGUN = "The snapshot that the sandbox was to begin with is gone."
_KEY = "tenant = %s and user_id = %s and sandbox_id = %s"
_FENCE = f"{_KEY} and generation = %s"


class Wish(NamedTuple):
    """What a new sandbox is to be. ``ttl_s`` None: an hour, or the template's lifetime if that is less."""

    template: str
    ttl_s: float | None
    metadata: str
    snapshot_id: UUID | None
    idempotency_key: str | None = None
    request_hash: bytes | None = None
    """What the key stands for."""


async def create(
    pool: Pool, key: RunKey, wish: Wish, own_host: str | None, most: int
) -> tuple[str, str | None]:
    """Accept a sandbox and choose its host; outcome and detail as ``create_sandbox`` in SQL has them."""
    made_of, again = wish[:4], wish[4:]
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select * from create_sandbox(%s, %s, %s, %s, %s, %s::jsonb, %s, %s, %s, %s, %s)",
            (*key, *made_of, own_host, most, *again),
        )
        row = await cursor.fetchone()
    assert row is not None
    return row[0], row[1]


async def made_by(pool: Pool, owner: Owner, idempotency_key: str) -> tuple[UUID, bytes] | None:
    """What an Idempotency-Key has made, and the hash of what it stands for; None: nothing yet."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select run_id, request_hash from idempotency_keys where tenant = %s and user_id = %s and key = %s",
            (*owner, idempotency_key),
        )
        return await cursor.fetchone()


async def get(pool: Pool, key: RunKey) -> Sandbox | None:
    """One of the owner's, whose time is not over."""
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Sandbox)) as cursor:
        await cursor.execute(
            f"{_SELECT} and s.sandbox_id = %(sandbox_id)s",
            {**key.owner._asdict(), "sandbox_id": key.run_id},
        )
        return await cursor.fetchone()


async def search(
    pool: Pool, owner: Owner, *, metadata: str | None, template: str | None, limit: int, offset: int
) -> list[Sandbox]:
    """The owner's, newest first; ``metadata`` is the JSON text of an object that theirs must contain."""
    async with pool.connection() as connection, connection.cursor(row_factory=class_row(Sandbox)) as cursor:
        await cursor.execute(
            f"""{_SELECT} and (%(metadata)s::jsonb is null or s.metadata @> %(metadata)s::jsonb)
                and (%(template)s::text is null or s.template = %(template)s)
                order by s.created_at desc, s.sandbox_id limit %(limit)s offset %(offset)s""",
            {
                **owner._asdict(),
                "metadata": metadata,
                "template": template,
                "limit": limit,
                "offset": offset,
            },
        )
        return await cursor.fetchall()


class Place(NamedTuple):
    """Where a sandbox is to be made. ``outcome``: placed, full, no_host or superseded."""

    outcome: str
    host_id: str | None
    address: str | None
    remote: str | None


async def place(pool: Pool, fence: Fence, own_host: str | None, refused: Sequence[str]) -> Place:
    """The host for a generation that is not made yet; ``refused`` are hosts that had no room or did not answer."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select * from place_alone(%s, %s, %s, %s, %s, %s::text[])",
            (*fence.key, fence.attempt, own_host, list(refused)),
        )
        row = await cursor.fetchone()
    assert row is not None
    return Place(*row)


async def made(pool: Pool, fence: Fence, known: str, restored: UUID | None) -> bool:
    """Note that a generation exists, and what its files began with. False if another one has begun.

    If the snapshot that it was to begin with expired meanwhile, a caller is told of that.
    """
    async with pool.connection() as connection, connection.transaction():
        cursor = await connection.execute(
            f"update sandboxes set restored = %s where {_FENCE} returning begins_with is not null and told",
            (restored, *fence.key, fence.attempt),
        )
        if (row := await cursor.fetchone()) is None:
            return False
        if row[0] and restored is None:
            await connection.execute(
                f"update sandboxes set told = false, lost = %s where {_KEY}", (_NOT_BEGUN, *fence.key)
            )
        await connection.execute(
            "update placements set sandbox_id = %s where tenant = %s and user_id = %s and run_id = %s",
            (known, *fence.key),
        )
    return True


async def lose(pool: Pool, fence: Fence, reason: str) -> bool:
    """End a generation that was lost: the next one is to be made, and a caller to be told. False if that has been done."""
    async with pool.connection() as connection, connection.transaction():
        return await _next(connection, fence, "lost = %s, told = false", (reason,))


async def workspace_bytes(pool: Pool, template: str) -> int | None:
    """How much a workspace of a template holds on the hosts that make it; None if none says so."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            "select max((templates -> %(name)s ->> 'workspace')::bigint) from open_hosts() where templates ? %(name)s",
            {"name": template},
        )
        row = await cursor.fetchone()
    return None if row is None else row[0]


async def restore(pool: Pool, fence: Fence, snapshot_id: UUID) -> bool:
    """Begin a generation with a snapshot, in place of this one. False if that one is over."""
    async with pool.connection() as connection, connection.transaction():
        changes = "begins_with = %s, begun_at = clock_timestamp(), told = true, lost = %s"
        return await _next(
            connection,
            fence,
            changes,
            (snapshot_id, f"The sandbox was begun anew from the snapshot {snapshot_id}."),
        )


async def _next(connection: Connection, fence: Fence, changes: str, values: tuple[Any, ...]) -> bool:
    cursor = await connection.execute(
        f"update sandboxes set generation = generation + 1, restored = null, {changes} where {_FENCE}",
        (*values, *fence.key, fence.attempt),
    )
    if not cursor.rowcount:
        return False
    await connection.execute(
        "update placements set sandbox_id = null where tenant = %s and user_id = %s and run_id = %s",
        fence.key,
    )
    return True


async def live(pool: Pool, key: RunKey, ttl_s: float) -> tuple[str, float | None]:
    """Let a sandbox end so many seconds from now. Outcome: ``done``; ``missing``; ``too_long`` with how many its template's
    lifetime leaves, counted from its creation; ``no_template`` when no host that is known makes it."""
    async with pool.connection() as connection:
        cursor = await connection.execute(
            f"""with held as (
                  select s.*, extract(epoch from clock_timestamp() - s.created_at)::float8 as age_s,
                    (select h.templates -> s.template ->> 'lifetime_s' from hosts h where h.templates ? s.template
                     order by h.heartbeat_at desc limit 1)::float8 as lifetime_s
                  from sandboxes s where {_KEY} and expires_at > clock_timestamp() for update),
                changed as (
                  update sandboxes s set expires_at = clock_timestamp() + make_interval(secs => %s) from held h
                  where s.tenant = h.tenant and s.user_id = h.user_id and s.sandbox_id = h.sandbox_id
                    and h.age_s + %s <= h.lifetime_s returning 1)
                select lifetime_s - age_s, exists (select 1 from changed) from held""",
            (*key, ttl_s, ttl_s),
        )
        row = await cursor.fetchone()
    if row is None:
        return "missing", None
    left_s, changed = row
    if left_s is None:
        return "no_template", None
    return ("done", None) if changed else ("too_long", left_s)


async def told(pool: Pool, fence: Fence) -> None:
    """Note that a caller has heard why the generation before this one ended."""
    async with pool.connection() as connection:
        await connection.execute(
            f"update sandboxes set told = true where {_FENCE}", (*fence.key, fence.attempt)
        )


async def remove(pool: Pool, key: RunKey) -> bool:
    """End a sandbox: its host removes what there is of it. False if there is none. Snapshots that were asked for stay."""
    async with pool.connection() as connection, connection.transaction():
        cursor = await connection.execute(f"delete from sandboxes where {_KEY}", key)
        if not cursor.rowcount:
            return False
        await _forget(connection, key)
    return True


async def take_back(pool: Pool, key: RunKey, idempotency_key: str | None) -> None:
    """Remove a sandbox that could not be made, and let its Idempotency-Key make another one. With a key one that has been made
    after all stays: by a copy of the request, whose caller uses it."""
    async with pool.connection() as connection, connection.transaction():
        await connection.execute("select 1 from tenants where tenant = %s for update", (key.tenant,))
        if idempotency_key is not None:
            await connection.execute(f"select 1 from sandboxes where {_KEY} for update", key)
            cursor = await connection.execute(
                """select 1 from sandboxes s join placements p using (tenant, user_id)
                    where p.run_id = s.sandbox_id and p.sandbox_id is not null and s.generation = 1
                      and s.tenant = %s and s.user_id = %s and s.sandbox_id = %s""",
                key,
            )
            if await cursor.fetchone() is not None:
                return
        await connection.execute(f"delete from sandboxes where {_KEY}", key)
        await _forget(connection, key)
        await connection.execute(
            "delete from idempotency_keys where tenant = %s and user_id = %s and key = %s and run_id = %s",
            (key.tenant, key.user_id, idempotency_key, key.run_id),
        )


async def expire(connection: Connection, limit: int) -> int:
    """Remove some sandboxes whose time is over; how many there were."""
    async with connection.transaction():
        cursor = await connection.execute(
            """delete from sandboxes where (tenant, user_id, sandbox_id) in (
                 select tenant, user_id, sandbox_id from sandboxes where expires_at < clock_timestamp()
                 order by expires_at limit %s for update skip locked)
               returning tenant, user_id, sandbox_id""",
            (limit,),
        )
        rows = await cursor.fetchall()
        for row in rows:
            await _forget(connection, RunKey(*row))
    return len(rows)


async def _forget(connection: Connection, key: RunKey) -> None:
    await connection.execute("delete from placements where tenant = %s and user_id = %s and run_id = %s", key)
    await connection.execute(
        """update snapshots set expires_at = '-infinity'
           where tenant = %s and user_id = %s and run_id = %s and reason <> 'request'""",
        key,
    )
