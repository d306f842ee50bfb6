"""Snapshots of workspaces: packed in the sandbox, kept in S3, known to PostgreSQL."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg_pool import PoolTimeout

from sandfleet.fleet.host import workspace
from sandfleet.fleet.host.bucket import Bucket
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox.errors import SnapshotDamaged, SnapshotFailed, StaleAttempt, TooManySnapshots
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.errors import HostUnavailable, SandfleetError
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, RunKey, new_id
from sandfleet.shared.settings import Settings
from sandfleet.shared.store import snapshots
from sandfleet.shared.store.placements import release
from sandfleet.shared.store.turns import take_turn

logger = logging.getLogger(__name__)

TURN = "snapshots"
"""Name of the turn that says who removes archives."""

_AT_ONCE = 4  # archives under way: each takes disk, up to the largest snapshot, and a thread's time
_TEND_EVERY_S = 60.0
_ANSWER_S = 5.0
_CHOOSE = "Choose a larger template, or delete the snapshot to begin without its files."


class Snapshots:
    """Takes and restores snapshots of the host's sandboxes. Without a bucket all is refused but restoring nothing."""

    def __init__(self, settings: Settings, folder: Path, host_id: str) -> None:
        """``folder`` is for archives on their way; what is there at the start is removed."""
        self._settings = settings
        self._host_id = host_id
        self._folder = folder
        self._bucket = Bucket(settings)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        self._pool = open_pool(
            settings.database_url, 2, min_size=0, limit_s=_ANSWER_S, name="sandfleet-host-snapshots"
        )
        self._pool_opened = False

    @property
    def kept(self) -> bool:
        """Whether there is a bucket to keep snapshots in."""
        return bool(self._settings.snapshot_bucket)

    @property
    def disk_bytes(self) -> int:
        """What archives on their way may take of the host's disk."""
        return _AT_ONCE * self._settings.snapshot_bytes if self.kept else 0

    async def take(self, sandbox: Sandbox, fence: Fence, reason: str) -> snapshots.Snapshot:
        """Save the workspace; ``reason`` as `Snapshot` names them. The sandbox goes on. Raises SnapshotFailed,
        TooManySnapshots, and StaleAttempt if the sandbox is one that its run, or its owner, has left behind."""
        if not self.kept:
            raise SnapshotFailed("No snapshots are kept here: set SANDFLEET_SNAPSHOT_BUCKET.")
        config = self._settings
        if reason == "request":  # before the work; what counts is the look when it is recorded
            async with self._database() as connection:
                await self._check_number(connection, fence.key.tenant)
        snapshot_id = new_id()
        key = "/".join(
            (quote(fence.key.tenant, safe=""), quote(fence.key.user_id, safe=""), f"{snapshot_id}.tar.zst")
        )
        async with self._slots, self._file() as file:
            packed = await workspace.save(
                sandbox, fence, file, sandbox.template.workspace, config.snapshot_bytes
            )
            size = file.stat().st_size
            await self._bucket.put(key, file)
        values = {
            "snapshot_id": snapshot_id,
            "reason": reason,
            "object_key": key,
            "bytes": size,
            "files": packed.files,
            "content_bytes": packed.bytes,
            "skipped": packed.skipped,
        }
        taken = await self._recorded(fence, values)
        logger.info(
            "snapshot taken",
            extra={
                "run_id": str(fence.key.run_id),
                "tenant": fence.key.tenant,
                "bytes": size,
                "reason": reason,
            },
        )
        return taken

    async def _check_number(self, connection: psycopg.AsyncConnection[Any], tenant: str) -> None:
        most = await snapshots.full(connection, tenant, self._settings.tenant_max_snapshots)
        if most is not None:
            raise TooManySnapshots(
                f"The tenant keeps {most} snapshots that were asked for, as many as it may. Delete one (DELETE /snapshots/ID), "
                "or wait until one's time is over.",
                retry_after_s=60,
            )

    async def _recorded(self, fence: Fence, values: dict[str, Any]) -> snapshots.Snapshot:
        """Note a snapshot whose archive is stored. Unless PostgreSQL has it, the archive is removed."""
        held = snapshots.Held(self._host_id, fence.attempt)
        try:
            async with self._database() as connection:
                async with connection.transaction():
                    if values["reason"] == "request":
                        await snapshots.count_alone(connection, fence.key.tenant)
                        await self._check_number(connection, fence.key.tenant)
                    taken = await snapshots.record(
                        connection, fence.key, values, self._settings.snapshot_keep_s, held
                    )
                reach("snapshot.recorded")
            if taken is None:
                raise StaleAttempt("This sandbox was left behind: there is a later one, with other files.")
        except BaseException as error:
            with suppress(SandfleetError):
                async with self._database() as connection:
                    found = await snapshots.get(connection, fence.key.owner, values["snapshot_id"])
                if found is not None and isinstance(error, SnapshotFailed):  # only the answer was lost
                    return found
                if found is None:
                    await self._bucket.delete([values["object_key"]])  # nobody else knows of it
            raise
        return taken

    async def release(self, held: Sequence[RunKey]) -> None:
        """The sandboxes of all runs but these have ended here, and no more are made: the next may be made anywhere. Never
        raises: without PostgreSQL it is so when this host is gone."""
        with suppress(SandfleetError):
            async with self._database() as connection:
                await release(connection, self._host_id, held)

    async def find(self, key: RunKey) -> tuple[snapshots.Snapshot | None, str | None]:
        """What a new sandbox of this run should begin with, and why that is not all that the run should find. Raises
        HostUnavailable when PostgreSQL does not answer: rather no sandbox now than one without its files."""
        try:
            async with self._database() as connection:
                found = await snapshots.to_restore(connection, key) if self.kept else None
                return found, await snapshots.lost(connection, key)
        except SnapshotFailed as error:
            raise HostUnavailable(error.message) from error

    async def restore(self, sandbox: Sandbox, fence: Fence, snapshot: snapshots.Snapshot) -> None:
        """Replace the workspace by a snapshot. Raises SnapshotFailed; one that cannot be read is given up, one that this
        sandbox cannot hold is not."""
        most = sandbox.template.workspace
        if snapshot.content_bytes > most:
            raise SnapshotFailed(
                f"The files of the snapshot {snapshot.snapshot_id} are {snapshot.content_bytes} bytes, and the workspace of "
                f"template {sandbox.template.name!r} holds {most}. {_CHOOSE}"
            )
        try:
            async with self._slots, self._file() as file:
                await self._bucket.get(snapshot.object_key, file)
                unpacked = await workspace.restore(sandbox, fence, file)
            if (unpacked.files, unpacked.bytes) != (snapshot.files, snapshot.content_bytes):
                raise SnapshotDamaged(f"It holds only {unpacked.files} of {snapshot.files} files.")
            if unpacked.missing:
                raise SnapshotFailed(
                    f"{unpacked.missing} of the {snapshot.files} files of the snapshot {snapshot.snapshot_id} could not be made "
                    f"in a sandbox of template {sandbox.template.name!r}. {_CHOOSE}"
                )
        except SnapshotDamaged as error:
            async with self._database() as connection:
                await snapshots.forget(connection, fence.key.owner, snapshot.snapshot_id)
            raise SnapshotDamaged(
                f"The snapshot {snapshot.snapshot_id} is given up, and the next use finds an empty sandbox. {error.message}"
            ) from error
        logger.info(
            "snapshot restored",
            extra={
                "run_id": str(fence.key.run_id),
                "tenant": fence.key.tenant,
                "snapshot": str(snapshot.snapshot_id),
            },
        )

    async def tend(self) -> None:
        """For ever: remove archives that have expired. Hosts take turns."""
        while True:
            await asyncio.sleep(_TEND_EVERY_S)
            if self.kept:
                with suppress(SandfleetError):
                    await self.remove_expired()

    async def remove_expired(self) -> int:
        """Remove what has expired if it is our turn; how many there were. Raises SnapshotFailed."""
        removed = 0
        async with self._database() as connection:
            if await take_turn(connection, TURN, _TEND_EVERY_S / 2):
                while rows := await snapshots.expired(connection):
                    await self._bucket.delete([row[3] for row in rows])
                    await snapshots.remove(connection, [row[:3] for row in rows])
                    removed += len(rows)
        return removed

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.close()
        await self._bucket.aclose()

    @asynccontextmanager
    async def _file(self) -> AsyncIterator[Path]:
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".tar.zst") as file:
            yield Path(file.name)

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        if not self._pool_opened:
            self._pool_opened = True
            await self._pool.open()
        try:
            async with self._pool.connection() as connection:
                yield connection
        except (psycopg.OperationalError, PoolTimeout) as error:
            raise SnapshotFailed("PostgreSQL does not answer; try again.") from error
