"""Ends runs, those of one tenant together: they queue on the tenant's row anyway, and one commit serves them all."""

from collections.abc import Sequence

from sandfleet.shared.db.group_commit import GroupCommit
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import Fence
from sandfleet.shared.store.claims import Ending, finish, finish_together
from sandfleet.shared.store.ready import ReadyRuns


class Finisher:
    """One per event loop."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._together = GroupCommit(self._finish)

    async def finish(self, fence: Fence, ending: Ending) -> tuple[bool, ReadyRuns]:
        """The terminal transaction of a run: see `claims.finish`. When PostgreSQL does not answer it raises a
        psycopg.OperationalError, psycopg.InterfaceError or PoolTimeout, after which ending the run again is safe."""
        if ending.stands_alone:
            async with self._pool.connection() as connection:
                return await finish(connection, fence, ending)
        return await self._together.do(fence.key.tenant, (fence, ending))

    async def _finish(self, endings: Sequence[tuple[Fence, Ending]]) -> list[tuple[bool, ReadyRuns]]:
        async with self._pool.connection() as connection:
            return await finish_together(connection, endings)
