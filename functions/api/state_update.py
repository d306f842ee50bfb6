"""Updating a thread's state: the graph's own code decides what that means, so an executor does it, as a run of a kind of
its own that nobody else sees."""

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson

from sandfleet.functions.api.cancelling import cancel_run
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.run_streams import wait_for_end
from sandfleet.shared.errors import BadRequest, InvalidRequest, NotFound, Unavailable
from sandfleet.shared.ids import Owner, RunKey, new_id
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import runs, threads
from sandfleet.shared.store.assistants import Runnable
from sandfleet.shared.store.submission import INTERACTIVE, Submission, submit

_STOP_S = 5.0  # an executor that has begun an update gets so long to stop it
_OURS = frozenset({"ExecutorLost", "RunTimeout"})  # failures that say nothing about the update


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """Values to write, the node they come from (None: the last one), and the checkpoint to build on (None: the head)."""

    values: Any
    as_node: str | None
    checkpoint: dict[str, Any] | None


async def update_state(
    found: Resources, owner: Owner, thread_id: UUID, wanted: StateUpdate
) -> dict[str, Any]:
    """Do the update and return ``{checkpoint, checkpoint_id, configurable}``.

    Raises NotFound (thread), Conflict (the thread is busy), BadRequest (no graph yet, or the graph refuses the update)
    and Unavailable (no executor in time; then it is withdrawn).
    """
    assistant = await _assistant(found, owner, thread_id)
    key = RunKey(*owner, new_id())
    config = orjson.loads(assistant.config)
    kwargs = {
        "on_disconnect": "continue",
        "values": wanted.values,
        "as_node": wanted.as_node,
        "checkpoint": wanted.checkpoint,
        "config": config,
        "context": orjson.loads(assistant.context),
    }
    await submit(
        found.pool,
        Submission(
            key=key,
            thread_id=thread_id,
            assistant_id=assistant.assistant_id,
            graph_id=assistant.graph_id,
            pool=assistant.pool,
            kwargs=to_json(kwargs).decode(),
            kind="update_state",
            run_class=INTERACTIVE,
            strategy="reject",
            timeout_s=found.settings.operation_timeout_s,
        ),
    )
    found.waker.wake(assistant.pool)
    try:
        await asyncio.wait_for(wait_for_end(found, key, fresh=True), found.settings.operation_timeout_s)
    except TimeoutError:
        await _withdraw(found, key)
    return await _result(found, key, thread_id)


async def _assistant(found: Resources, owner: Owner, thread_id: UUID) -> Runnable:
    """The assistant that the thread's last run was of, or else the deployment's for its graph."""
    metadata = orjson.loads(await threads.require(found.pool, owner, thread_id))
    for name in ("assistant_id", "graph_id"):
        try:
            if isinstance(metadata.get(name), str):
                return await found.known_assistants.find(owner, metadata[name])
        except (NotFound, InvalidRequest):
            continue  # it was deleted, or the metadata is the caller's own
    raise BadRequest(
        "The thread has no graph yet. Run an assistant on it, or put graph_id into its metadata."
    )


async def _withdraw(found: Resources, key: RunKey) -> None:
    """Cancel an update that takes too long. If it has begun, wait until it is known how it ended."""
    try:
        await cancel_run(found, key, "interrupt")
        await asyncio.wait_for(wait_for_end(found, key), _STOP_S)
    except (NotFound, TimeoutError):
        pass  # it ended meanwhile, or will not say


async def _result(found: Resources, key: RunKey, thread_id: UUID) -> dict[str, Any]:
    try:
        run = await runs.state(found.pool, key.owner, thread_id, key.run_id)
    except NotFound:
        raise NotFound("Thread not found.") from None  # deleted while we waited
    if run.status in runs.ACTIVE:
        raise Unavailable(
            "The update was begun but has not ended. Read the state to see whether it was made.",
            retry_after_s=5,
        )
    await runs.forget_operation(found.pool, key.owner, thread_id, key.run_id, failed=run.status != "success")
    if run.status == "success" and run.output is not None:
        result: dict[str, Any] = orjson.loads(run.output)
        return result
    error = orjson.loads(run.error) if run.error else None
    if run.status == "error" and error is not None and error.get("error") not in _OURS:
        raise BadRequest(f"{error.get('error')}: {error.get('message')}")
    raise Unavailable("No executor made the update in time; nothing was changed.", retry_after_s=5)
