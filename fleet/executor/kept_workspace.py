"""The workspace of a run that is interrupted, for whichever run resumes it."""

import asyncio
import logging

import psycopg
from psycopg_pool import PoolTimeout

from sandfleet.fleet.executor.fenced_writer import ExecutorStopped
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import SandfleetError, Superseded
from sandfleet.shared.ids import Fence
from sandfleet.shared.store.snapshots import note_lost

_log = logging.getLogger(__name__)
_PAUSE_S = 0.5


async def keep(sandbox: RunSandbox, fence: Fence, lease: Lease, pool: Pool) -> None:
    """Keep the files of a run's sandbox, which ends with the run. It may be one of an earlier attempt; if that was lost, what is
    kept are the files that its replacement begins with. Whoever resumes hears of what is missing: that is noted, however long
    PostgreSQL is away.

    Raises Superseded and ExecutorStopped when the run is not this attempt's any more.
    """
    if missing := await _keep(sandbox):
        await _note(fence, missing, lease, pool)


async def _keep(sandbox: RunSandbox) -> str | None:
    """Why something is missing of what the run has left; None if nothing is."""
    missing: str | None = None
    for again in (False, True):
        try:
            await sandbox.snapshot("interrupt")
            break
        except SandboxLost as lost:
            _log.warning("workspace lost before it was kept: %s", lost.message)
            if again or not lost.files_kept:
                missing = lost.reason
        except (Superseded, ExecutorStopped):
            raise
        except SandfleetError as error:
            _log.warning("workspace not kept: %s", error.code)
            return f"The workspace of the interrupted run could not be kept. {error.message}"
    return missing


async def _note(fence: Fence, missing: str, lease: Lease, pool: Pool) -> None:
    while True:
        try:
            async with pool.connection() as connection:
                await note_lost(connection, fence, missing)
            return
        except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout):
            await asyncio.sleep(_PAUSE_S)
            await lease.certain()
