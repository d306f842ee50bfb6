"""The rule within the Docker Engine: a run's sandbox is gone soon after the run's end, and one without a run after its own."""

import asyncio
import time
from typing import Any

from psycopg import AsyncConnection

from sandfleet.localstack import docker_api
from sandfleet.shared.invariants import GONE_S, Violation

_POLL_S = 1.0


async def check_sandboxes(
    connection: AsyncConnection[Any], docker_host: str, label: str
) -> tuple[list[Violation], int]:
    """Find containers whose run has been over for longer than it may take to remove them; returns them and how many
    containers there are.

    When a run was erased nobody knows: such a container is watched until it is gone or its time is over.
    """
    deadline = time.monotonic() + GONE_S
    while True:
        found = await asyncio.to_thread(docker_api.sandbox_containers, docker_host, label)
        cursor = await connection.execute(
            """select c.name, r.finished_at < clock_timestamp() - make_interval(secs => %s), r.run_id is null
               from unnest(%s::text[], %s::uuid[]) c (name, run_id)
               left join runs r on r.run_id = c.run_id
               where (r.run_id is null or r.finished_at is not null)
                 and not exists (select 1 from sandboxes s where s.sandbox_id = c.run_id and s.expires_at > clock_timestamp())""",
            (GONE_S, [c.name for c in found], [c.run_id for c in found]),
        )
        rows = await cursor.fetchall()
        ages = {c.name: c.age_s for c in found}
        watched = [name for name, _, erased in rows if erased and ages[name] > GONE_S]
        if not watched or time.monotonic() > deadline:
            return [
                Violation("sandbox of an ended run", name, "its run is over, or is not known any more")
                for name, overdue, _ in rows
                if overdue or name in watched
            ], len(found)
        await asyncio.sleep(_POLL_S)
