"""The sandbox hosts as an executor sees them: PostgreSQL says which one, and how it is reached."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

import psycopg
from psycopg_pool import PoolTimeout

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.fleet.sandbox.hosts import Placed
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import HostAway, HostUnavailable, NoRoom, SandboxError, Superseded
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.placements import Need, Place, know_sandbox, knows_sandbox, place
from sandfleet.shared.templates import Templates

_log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_LOOK_AGAIN_S = 10.0  # for a host on this machine, whose name may have changed or which may have come


class Placement:
    """One per process, on the graphs' loop."""

    def __init__(self, settings: Settings, pool: Pool, templates: Templates) -> None:
        self._pool = pool
        self._templates = templates
        self._own = SandboxClient(settings.host_socket)
        self._own_id: str | None = None
        self._asked_at: float | None = None
        self._asking = asyncio.Lock()
        self._remote: dict[str, SandboxClient] = {}

    async def place(
        self,
        fence: Fence,
        template: str,
        refused: Collection[str],
        still_ours: Callable[[], Awaitable[object]],
    ) -> Placed:
        """The host of the run's sandbox. Waits while PostgreSQL does not answer, for as long as the run is ours.

        Raises NoRoom, HostUnavailable, TemplateUnavailable, and what ``still_ours`` raises.
        """
        made_of = self._templates.templates.get(template)
        if made_of is None:
            known = ", ".join(sorted(self._templates.templates))
            raise TemplateUnavailable(f"There is no sandbox template {template!r}, only {known}.")
        need = Need(template, made_of.memory, made_of.pids)
        own = await self._own_host()
        while True:
            try:
                async with self._pool.connection() as connection:
                    found = await place(connection, fence, need, own, list(refused))
                    if found.outcome == "placed" and found.host_id not in (None, own) and not found.remote:
                        # Nobody reaches it from here; if it is not heard of either, its sandbox is lost.
                        other = await place(connection, fence, need, own, [*refused, str(found.host_id)])
                        found = found if other.outcome == "away" else other
                break
            except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, OSError):
                await asyncio.sleep(_PAUSE_S)
                await still_ours()
        return self._placed(found, own)

    def _placed(self, found: Place, own: str | None) -> Placed:
        if found.outcome == "superseded":
            raise Superseded("Another attempt, or the end of the run, came first.")
        if found.outcome == "full":
            raise NoRoom("No sandbox host has room; try again when a sandbox has ended.")
        if found.outcome == "no_host":
            raise HostAway(
                "No sandbox host answers that this executor can reach: start one (sandfleet dev, or "
                "python -m sandfleet.fleet.host), with SANDFLEET_HOST_LISTEN if it is on another machine."
            )
        if found.outcome == "away":
            raise HostUnavailable("The host of the run's sandbox does not answer; it may come back.")
        assert found.host_id is not None
        if found.host_id == own:
            return Placed(found.host_id, self._own, found.sandbox_id)
        if found.remote is None:
            raise HostUnavailable(
                f"The run's sandbox is on {found.host_id}, which this executor cannot reach: set SANDFLEET_HOST_LISTEN there."
            )
        client = self._remote.get(found.remote)
        if client is None:
            client = self._remote[found.remote] = SandboxClient(found.remote)
        return Placed(found.host_id, client, found.sandbox_id)

    async def know(self, fence: Fence, sandbox_id: str) -> None:
        """Note which sandbox the run works in; without PostgreSQL it stays unknown, and its loss is told by the host."""
        try:
            async with self._pool.connection() as connection:
                await know_sandbox(connection, fence, sandbox_id)
        except (psycopg.Error, PoolTimeout, OSError) as error:
            _log.warning("a run's sandbox was not noted: %s", type(error).__name__)

    async def known(self, fence: Fence) -> bool:
        """Whether a sandbox was noted for the run. Raises HostUnavailable without PostgreSQL."""
        try:
            async with self._pool.connection() as connection:
                return await knows_sandbox(connection, fence.key)
        except (psycopg.Error, PoolTimeout, OSError) as error:
            raise HostUnavailable("PostgreSQL does not answer; try again.") from error

    async def _own_host(self) -> str | None:
        """The name of the host on this machine, if one answers at SANDFLEET_HOST_SOCKET."""
        async with self._asking:
            now = time.monotonic()
            if self._asked_at is None or self._own_id is None or now > self._asked_at + _LOOK_AGAIN_S:
                self._asked_at = now
                try:
                    self._own_id = str((await self._own.health())["host_id"])
                except (SandboxError, TimeoutError, KeyError):
                    self._own_id = None
            return self._own_id

    async def aclose(self) -> None:
        """Close all connections."""
        await self._own.aclose()
        for client in self._remote.values():
            await client.aclose()
