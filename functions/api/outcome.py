"""A run's own outcome, as ``wait`` and ``join`` report it: not the thread's, which may have moved on."""

from typing import Any
from uuid import UUID

import orjson

from sandfleet.functions.api.responses import fragment
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import NotFound
from sandfleet.shared.ids import Owner, RunKey
from sandfleet.shared.store import runs, thread_values

_GONE = {"__error__": {"error": "RunNotFound", "message": "The run was rolled back or deleted."}}


async def outcome(pool: Pool, owner: Owner, thread_id: UUID, run_id: UUID) -> bytes:
    """JSON of the values at the run's last checkpoint, with ``__interrupt__`` when it waits for an answer; or
    ``{"__error__": {error, message}}`` of a run that failed."""
    try:
        run = await runs.state(pool, owner, thread_id, run_id)
    except NotFound:
        return orjson.dumps(_GONE)
    if run.status in ("error", "timeout"):
        return orjson.dumps({"__error__": fragment(run.error)})
    output: dict[str, Any] = orjson.loads(run.output) if run.output else {}
    text = await thread_values.newest(pool, owner, thread_id, output.get("checkpoint_id"))
    waiting = [
        {"response_schema": None, **interrupt}
        for each in (output.get("interrupts") or {}).values()
        for interrupt in each
    ]
    if not waiting:
        return (text or "{}").encode()
    values = orjson.loads(text) if text else {}
    if not isinstance(values, dict):
        values = {}
    return orjson.dumps({**values, "__interrupt__": waiting})


async def state_of(pool: Pool, key: RunKey) -> str:
    """What a client gets in place of events that were lost: ``{"run_id", "status", "values"}`` as JSON text.

    Raises NotFound when the run is gone.
    """
    run = await runs.state(pool, key.owner, None, key.run_id)
    values = await thread_values.newest(pool, key.owner, run.thread_id)
    return orjson.dumps({"run_id": run.run_id, "status": run.status, "values": fragment(values)}).decode()
