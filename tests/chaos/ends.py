"""Who waits for the end of a run asks here: one look at the database for all of them."""

import asyncio
import time
from uuid import UUID

import psycopg

_LOOK_EVERY_S = 0.3


class Ends:
    """Watches runs until they have ended or are gone. ``progress_at`` is when one last did, by `time.monotonic`."""

    def __init__(self, database_url: str) -> None:
        self.progress_at = time.monotonic()
        self._database_url = database_url
        self._awaited: dict[str, asyncio.Future[None]] = {}

    @property
    def awaited(self) -> list[str]:
        """Ids of the runs that have not ended."""
        return list(self._awaited)

    async def of(self, run_id: str) -> None:
        """Return when the run has ended or is gone."""
        if run_id:
            future = self._awaited.setdefault(run_id, asyncio.get_running_loop().create_future())
            await asyncio.shield(future)

    async def watch(self) -> None:
        """Look for ends, for ever, whatever happens to the database."""
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._database_url, autocommit=True, connect_timeout=5
                ) as connection:
                    while True:
                        await asyncio.sleep(_LOOK_EVERY_S)
                        await self._look(connection)
            except (psycopg.OperationalError, OSError):
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self, connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
        if not self._awaited:
            return
        cursor = await connection.execute(
            "select run_id::text from runs where run_id = any(%s) and status in ('pending', 'running')",
            ([UUID(run_id) for run_id in self._awaited],),
        )
        active = {row[0] for row in await cursor.fetchall()}
        for run_id in [run_id for run_id in self._awaited if run_id not in active]:
            self._awaited.pop(run_id).set_result(None)
            self.progress_at = time.monotonic()
