"""Which assistant a run is for. Those of the deployment are remembered for a moment: they change with deployments only."""

import time
from uuid import UUID

from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import InvalidRequest, NotFound
from sandfleet.shared.ids import Owner, graph_assistant_id
from sandfleet.shared.store import assistants
from sandfleet.shared.store.assistants import Runnable

_KEEP_S = 2.0


class KnownAssistants:
    """Finds assistants; the deployment's are as they were at most two seconds ago."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[UUID, tuple[Runnable, float]] = {}

    async def find(self, owner: Owner, name_or_id: str) -> Runnable:
        """The assistant with this id, or the deployment's for the graph of this name.

        Raises NotFound for an unknown id and InvalidRequest for an unknown name.
        """
        try:
            assistant_id = UUID(name_or_id)
            is_name = False
        except ValueError:
            assistant_id = graph_assistant_id(name_or_id)
            is_name = True
        known = self._known.get(assistant_id)
        if known is not None and time.monotonic() < known[1]:
            return known[0]
        found = await assistants.find_runnable(self._pool, owner, assistant_id)
        if found is None:
            if is_name:
                raise InvalidRequest(
                    "assistant_id: no graph has this name; POST /assistants/search lists what is deployed"
                )
            raise NotFound("Thread or assistant not found.")
        if found.is_system:
            self._known[assistant_id] = (found, time.monotonic() + _KEEP_S)
        return found
