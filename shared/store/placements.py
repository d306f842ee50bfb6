"""Which host a run's sandbox is on, and runs that wait for room on one. ``db/versions/0010_hosts_that_can.sql`` and
``0001_placements.sql`` have the rules."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from psycopg import AsyncConnection

from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.store.ready import ReadyRuns, ready_by_pool

Connection = AsyncConnection[Any]

STARVING_S = 60.0
"""Who has waited longer for room comes before everybody else, and room is kept for it when it needs much."""


class Need(NamedTuple):
    """What a sandbox is made of and takes: memory in bytes, processes and threads."""

    template: str
    memory: int
    pids: int


class Place(NamedTuple):
    """The answer to the wish for a sandbox.

    ``outcome``: placed, full, away (the run's host does not answer now, but may come back), no_host or superseded.
    ``address`` is unix:PATH, ``remote`` http://HOST:PORT or None, ``sandbox_id`` what the run had there before.
    """

    outcome: str
    host_id: str | None
    address: str | None
    remote: str | None
    sandbox_id: str | None


async def place(
    connection: Connection, fence: Fence, need: Need, own_host: str | None, refused: Sequence[str]
) -> Place:
    """Where the run's sandbox is or is to be made: on its host, else ``own_host``, else the emptiest that has room.

    ``refused`` are hosts that have refused or not answered. When all are full the run is noted as waiting.
    """
    cursor = await connection.execute(
        "select * from place_sandbox(%s, %s, %s, %s, %s, %s, %s, %s, %s::text[])",
        (*fence.key, fence.attempt, *need, own_host, list(refused)),
    )
    row = await cursor.fetchone()
    assert row is not None
    reach("placement.committed")
    return Place(*row)


async def know_sandbox(connection: Connection, fence: Fence, sandbox_id: str) -> None:
    """Note which sandbox the run works in, so that a later attempt notices when it is another one."""
    await connection.execute(
        """with held as materialized (
             select 1 from runs where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
               and attempt = %(attempt)s and status = 'running' for share)
           update placements set sandbox_id = %(sandbox_id)s
           where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s and exists (select 1 from held)""",
        {**fence.key._asdict(), "attempt": fence.attempt, "sandbox_id": sandbox_id},
    )


async def release(connection: Connection, host_id: str, held: Sequence[RunKey]) -> None:
    """Let the next sandboxes of runs be made elsewhere at once: this host has ended those that they know, but for the ones in
    ``held``, and makes no more. The next one is still another than they know, so they hear of the loss."""
    await connection.execute(
        """update placements p set sandbox_id = 'ended'
           where p.host_id = %(host_id)s and p.sandbox_id <> 'ended'
             and (p.tenant, p.user_id, p.run_id) not in (
               select * from unnest(%(tenants)s::text[], %(users)s::text[], %(ids)s::uuid[]))
             and exists (select 1 from runs r where r.tenant = p.tenant and r.user_id = p.user_id and r.run_id = p.run_id)""",
        {
            "host_id": host_id,
            "tenants": [key.tenant for key in held],
            "users": [key.user_id for key in held],
            "ids": [key.run_id for key in held],
        },
    )


async def knows_sandbox(connection: Connection, key: RunKey) -> bool:
    """Whether a sandbox was noted for the run, or one that is no more has left its files."""
    cursor = await connection.execute(
        """select 1 from placements
           where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s and sandbox_id is not null
           union all
           select 1 from snapshots
           where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s and expires_at > clock_timestamp()
           limit 1""",
        key._asdict(),
    )
    return await cursor.fetchone() is not None


async def suspend_for_room(connection: Connection, fence: Fence) -> ReadyRuns:
    """Give a run back that no host has room for: it waits without a slot, a tenant's slot or a lease.

    Returns the runs that its slot was passed on to. Does nothing for one that was superseded.
    """
    async with connection.transaction():
        cursor = await connection.execute(
            "select * from suspend_for_room(%s, %s, %s, %s)", (*fence.key, fence.attempt)
        )
        rows = await cursor.fetchall()
        reach("suspend.uncommitted")
    reach("suspend.committed")
    return ready_by_pool((pool, count) for _, pool, count in rows)


class Waiting(NamedTuple):
    """A run that waits for room: what it needs, and whether it has waited for so long that others make way."""

    key: RunKey
    need: Need
    starving: bool


async def waiting_for_room(connection: Connection, limit: int) -> list[Waiting]:
    """Those that room is given to, in this order: who has waited for a minute by time, then the fair order."""
    cursor = await connection.execute(
        """select p.tenant, p.user_id, p.run_id, p.template, p.memory, p.pids, w.starving
           from placements p join runs r using (tenant, user_id, run_id),
             lateral (select p.placed_at < clock_timestamp() - make_interval(secs => %s) as starving) w
           where p.host_id is null and r.gate = 'room'
           order by w.starving desc, case when w.starving then p.placed_at end, r.class, r.vtime, r.seq limit %s""",
        (STARVING_S, limit),
    )
    return [Waiting(RunKey(*row[:3]), Need(*row[3:6]), row[6]) for row in await cursor.fetchall()]


async def give_room(connection: Connection, key: RunKey, kept: Sequence[str]) -> tuple[str, ReadyRuns]:
    """Give a waiting run its place: ``done``, ``full``, or ``gone`` if it waits no more; and the runs that became ready.

    ``kept`` are hosts whose room is kept for somebody else.
    """
    cursor = await connection.execute("select * from give_room(%s, %s, %s, %s::text[])", (*key, list(kept)))
    rows = await cursor.fetchall()
    return rows[0][0], ready_by_pool((pool, count) for _, pool, count in rows)


async def hosts_that_could(connection: Connection, need: Need) -> list[str]:
    """Hosts that are large enough for a sandbox once others have ended."""
    cursor = await connection.execute(
        """select h.host_id from open_hosts() h
           where host_makes(h, %(template)s) and h.memory >= %(memory)s and h.pids >= %(pids)s
             and (h.disk is null or h.disk >= host_disk_need(h, %(template)s))""",
        need._asdict(),
    )
    return [row[0] for row in await cursor.fetchall()]
