"""Which sandbox host a run uses."""

from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Protocol

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.shared.ids import Fence


class Placed(NamedTuple):
    """The host of a run's sandbox, and the id of the sandbox that the run knows of, if it had one."""

    host_id: str
    client: SandboxClient
    sandbox_id: str | None


class Hosts(Protocol):
    """Finds hosts with room."""

    async def place(
        self,
        fence: Fence,
        template: str,
        refused: Collection[str],
        still_ours: Callable[[], Awaitable[object]],
    ) -> Placed:
        """The host where the run's sandbox is or is to be made; ``refused`` had no room or did not answer, and one of them
        is only given if there is no other.

        ``still_ours`` waits while the lease is in doubt, and raises once it is lost. Raises NoRoom, HostUnavailable, and
        Superseded.
        """

    async def know(self, fence: Fence, sandbox_id: str) -> None:
        """Note which sandbox the run works in."""

    async def known(self, fence: Fence) -> bool:
        """Whether a sandbox was noted for the run, by an earlier attempt too. Raises HostUnavailable if nobody can tell."""


class OneHost:
    """The only host there is, for programs that work without PostgreSQL."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client

    async def place(
        self,
        fence: Fence,
        template: str,
        refused: Collection[str],
        still_ours: Callable[[], Awaitable[object]],
    ) -> Placed:
        return Placed("the host", self._client, None)

    async def know(self, fence: Fence, sandbox_id: str) -> None:
        return

    async def known(self, fence: Fence) -> bool:
        return True  # nobody notes it, so the host is asked
