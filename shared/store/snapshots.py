"""Snapshots of workspaces: what PostgreSQL knows of the archives in the bucket."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import class_row

from sandfleet.shared.ids import Fence, Owner, RunKey

Connection = AsyncConnection[Any]

BATCH = 100
"""Snapshots that are forgotten at a time."""

_COLUMNS = (
    "snapshot_id, run_id, thread_id, reason, object_key, bytes, files, content_bytes, skipped, created_at"
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A workspace as it was. ``reason``: ``drain`` (its host ended it), ``interrupt`` (its run waits for somebody) or
    ``request``."""

    snapshot_id: UUID
    run_id: UUID
    """Whose workspace it was: a run, or a sandbox of its own."""
    thread_id: UUID | None
    reason: str
    object_key: str
    bytes: int
    """Size of the archive."""
    files: int
    content_bytes: int
    """Size of all files together."""
    skipped: int
    """Files that could not be packed."""
    created_at: datetime


class Held(NamedTuple):
    """Who says that a sandbox is the one that counts: its host, and the latest attempt (or generation) seen there."""

    host_id: str
    attempt: int


async def record(
    connection: Connection, key: RunKey, snapshot: dict[str, Any], keep_s: float, held: Held
) -> Snapshot | None:
    """Note a snapshot whose archive is in the bucket: ``snapshot_id``, ``reason``, ``object_key``, ``bytes``, ``files``,
    ``content_bytes``, ``skipped``. It is kept for ``keep_s``. Those that were not asked for replace one another: of a run, and of
    the interrupted runs of its thread; but for what a sandbox without a run began with, which a loss brings back. None and
    nothing noted if the sandbox is elsewhere or of an earlier generation by now, or, but for ``drain``, a later attempt has the
    run: what replaced it may have newer files."""
    async with connection.transaction(), connection.cursor(row_factory=class_row(Snapshot)) as cursor:
        if not await _counts(connection, key, held, snapshot["reason"]):
            return None
        await cursor.execute(
            """update snapshots set expires_at = '-infinity'
               where tenant = %(tenant)s and user_id = %(user_id)s and reason <> 'request' and (
                 run_id = %(run_id)s or reason = 'interrupt' and thread_id = (
                   select thread_id from runs
                   where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s))
                 and not exists (
                   select 1 from sandboxes b where b.tenant = snapshots.tenant and b.user_id = snapshots.user_id
                     and b.begins_with = snapshots.snapshot_id and b.sandbox_id <> snapshots.run_id)""",
            key._asdict(),
        )
        await cursor.execute(
            f"""insert into snapshots (tenant, user_id, run_id, thread_id, snapshot_id, reason, object_key, bytes, files,
                                       content_bytes, skipped, expires_at)
                select k.tenant, k.user_id, k.run_id, r.thread_id, %(snapshot_id)s, %(reason)s, %(object_key)s, %(bytes)s,
                       %(files)s, %(content_bytes)s, %(skipped)s, clock_timestamp() + make_interval(secs => %(keep_s)s)
                from (values (%(tenant)s, %(user_id)s, %(run_id)s::uuid)) k (tenant, user_id, run_id)
                left join runs r using (tenant, user_id, run_id)
                returning {_COLUMNS}""",
            {**snapshot, **key._asdict(), "keep_s": keep_s},
        )
        recorded = await cursor.fetchone()
        assert recorded is not None
        return recorded


async def _counts(connection: Connection, key: RunKey, held: Held, reason: str) -> bool:
    """Whether the sandbox is the one that counts, and stays it until the transaction ends."""
    if reason != "drain":
        cursor = await connection.execute(
            "select attempt from runs where tenant = %s and user_id = %s and run_id = %s for share", key
        )
        if (row := await cursor.fetchone()) is not None and row[0] > held.attempt:
            return False
    cursor = await connection.execute(
        "select generation from sandboxes where tenant = %s and user_id = %s and sandbox_id = %s for share",
        key,
    )
    if (row := await cursor.fetchone()) is not None and row[0] != held.attempt:
        return False
    cursor = await connection.execute(
        """select 1 from placements where tenant = %s and user_id = %s and run_id = %s and host_id = %s for share""",
        (*key, held.host_id),
    )
    return await cursor.fetchone() is not None


async def to_restore(connection: Connection, key: RunKey) -> Snapshot | None:
    """What a new sandbox begins with: the latest snapshot of its own, unless it was begun anew since then; else, if it is of a
    run that goes on where an interrupted run of its thread stopped (it brings no input), what that one left; or, if it is of
    no run, what its owner chose."""
    async with connection.cursor(row_factory=class_row(Snapshot)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS} from (
                  select s.*, 0 as place from snapshots s
                  where s.tenant = %(tenant)s and s.user_id = %(user_id)s and s.run_id = %(run_id)s
                    and not exists (select 1 from sandboxes b where b.tenant = s.tenant and b.user_id = s.user_id
                      and b.sandbox_id = s.run_id and b.begun_at > s.created_at)
                  union all
                  select s.*, 1 from runs r join snapshots s using (tenant, user_id, thread_id)
                  where r.tenant = %(tenant)s and r.user_id = %(user_id)s and r.run_id = %(run_id)s
                    and s.reason = 'interrupt' and r.kwargs ->> 'input' is null
                  union all
                  select s.*, 1 from sandboxes b join snapshots s on s.tenant = b.tenant and s.user_id = b.user_id
                    and s.snapshot_id = b.begins_with
                  where b.tenant = %(tenant)s and b.user_id = %(user_id)s and b.sandbox_id = %(run_id)s
                ) found where expires_at > clock_timestamp() order by place, created_at desc limit 1""",
            key._asdict(),
        )
        return await cursor.fetchone()


async def get(connection: Connection, owner: Owner, snapshot_id: UUID) -> Snapshot | None:
    """One of the owner's, if it is still kept."""
    async with connection.cursor(row_factory=class_row(Snapshot)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS} from snapshots where tenant = %s and user_id = %s and snapshot_id = %s
                and expires_at > clock_timestamp()""",
            (*owner, snapshot_id),
        )
        return await cursor.fetchone()


async def page(
    connection: Connection, owner: Owner, of: UUID | None, limit: int, offset: int
) -> list[Snapshot]:
    """The owner's, of a run or a sandbox if one is named, newest first."""
    async with connection.cursor(row_factory=class_row(Snapshot)) as cursor:
        await cursor.execute(
            f"""select {_COLUMNS} from snapshots
                where tenant = %(tenant)s and user_id = %(user_id)s and (%(of)s::uuid is null or run_id = %(of)s)
                  and expires_at > clock_timestamp()
                order by created_at desc, snapshot_id limit %(limit)s offset %(offset)s""",
            {**owner._asdict(), "of": of, "limit": limit, "offset": offset},
        )
        return await cursor.fetchall()


async def note_lost(connection: Connection, fence: Fence, reason: str) -> None:
    """Note that the workspace of a run that is interrupted could not be kept: whoever resumes it hears ``reason``. Nothing is noted
    if the run never had a host for a sandbox, or another attempt has it."""
    async with connection.transaction():
        await connection.execute(
            """select 1 from threads where (tenant, user_id, thread_id) = (
                 select tenant, user_id, thread_id from runs where tenant = %s and user_id = %s and run_id = %s)
               for key share""",
            fence.key,
        )
        await connection.execute(
            """with held as materialized (
                 select tenant, user_id, thread_id, run_id from runs
                 where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
                   and attempt = %(attempt)s and status = 'running' for share)
               insert into lost_workspaces (tenant, user_id, thread_id, run_id, reason)
               select h.tenant, h.user_id, h.thread_id, h.run_id, %(reason)s from held h
                 join threads using (tenant, user_id, thread_id)
                 join placements p using (tenant, user_id, run_id) where p.host_id is not null
               on conflict (tenant, user_id, thread_id) do update set
                 run_id = excluded.run_id, reason = excluded.reason, lost_at = excluded.lost_at""",
            {**fence.key._asdict(), "attempt": fence.attempt, "reason": reason},
        )


async def lost(connection: Connection, key: RunKey) -> str | None:
    """Why the workspace was not kept that a run would begin with: it goes on where an interrupted run of its thread stopped, as
    `to_restore` has it, and no interrupted run has kept its workspace since. None: nothing is missing."""
    cursor = await connection.execute(
        """select l.reason from runs r join lost_workspaces l using (tenant, user_id, thread_id)
           where r.tenant = %(tenant)s and r.user_id = %(user_id)s and r.run_id = %(run_id)s
             and l.run_id <> r.run_id and r.kwargs ->> 'input' is null
             and not exists (select 1 from snapshots s where s.tenant = r.tenant and s.user_id = r.user_id
               and s.thread_id = r.thread_id and s.reason = 'interrupt' and s.created_at > l.lost_at)""",
        key._asdict(),
    )
    row = await cursor.fetchone()
    return None if row is None else row[0]


async def count_alone(connection: Connection, tenant: str) -> None:
    """Until the transaction ends, nobody else counts and adds to a tenant's snapshots. Before any lock on a row."""
    await connection.execute(
        "select pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"snapshots {tenant}",)
    )


async def full(connection: Connection, tenant: str, most: int) -> int | None:
    """How many snapshots on request a tenant may keep, if it has as many; None if it may have more. ``most`` unless its own
    row says otherwise."""
    cursor = await connection.execute(
        """select m.most from (
             select coalesce((select max_snapshots from tenants where tenant = %(tenant)s), %(most)s) as most) m
           where m.most <= (select count(*) from snapshots where tenant = %(tenant)s and reason = 'request'
             and expires_at > clock_timestamp())""",
        {"tenant": tenant, "most": most},
    )
    row = await cursor.fetchone()
    return None if row is None else row[0]


async def forget(connection: Connection, owner: Owner, snapshot_id: UUID) -> None:
    """Let a snapshot expire now; one that is gone is fine."""
    await connection.execute(
        "update snapshots set expires_at = '-infinity' where tenant = %s and user_id = %s and snapshot_id = %s",
        (*owner, snapshot_id),
    )


async def expired(connection: Connection) -> list[tuple[str, str, UUID, str]]:
    """Some snapshots that nobody can ask for any more: tenant, user, id, object key. Their archives go first, then
    `remove` takes the rows: the other way round, a crash between would leave archives that nobody knows of."""
    cursor = await connection.execute(
        """select tenant, user_id, snapshot_id, object_key from snapshots where expires_at < clock_timestamp()
           order by expires_at limit %s""",
        (BATCH,),
    )
    return await cursor.fetchall()


async def remove(connection: Connection, keys: list[tuple[str, str, UUID]]) -> None:
    """Remove the rows of snapshots whose archives are gone."""
    await connection.execute(
        """delete from snapshots where (tenant, user_id, snapshot_id) in (
             select * from unnest(%s::text[], %s::text[], %s::uuid[]))""",
        tuple([key[place] for key in keys] for place in range(3)),
    )
