"""A thread's states as rows of JSON, so that they can be read without LangGraph and without the graph's code."""

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph._internal._constants import ERROR, INTERRUPT, NULL_TASK_ID, RETURN
from langgraph.checkpoint.base import CheckpointMetadata, get_checkpoint_metadata
from langgraph.pregel.debug import map_task_result_writes
from langgraph.types import Interrupt, PregelTask, StateSnapshot

from sandfleet.fleet.executor.fenced_rows import Row, SnapshotRow, StateBlobRow
from sandfleet.shared.json_text import to_json

INLINE_BYTES = 16 * 1024
"""JSON of a value up to this size is in the snapshot's own row; larger ones are stored once per content."""

Writes = Sequence[tuple[str, Any]]
"""What a task has written: (channel, value), in order."""

_UUID_EPOCH = datetime(1582, 10, 15, tzinfo=UTC)


def payload_rows(
    thread_id: str,
    run_id: uuid.UUID | None,
    payload: Mapping[str, Any],
    known_blobs: set[bytes] | None = None,
    parent_writes: Mapping[str, Writes] | None = None,
) -> list[Row]:
    """Rows for one payload of LangGraph's ``checkpoints`` stream.

    ``parent_writes`` is what the tasks of the parent checkpoint have written, by their ids: the payload of a checkpoint
    comes before its tasks have begun, so the one behind it tells what they came to. ``known_blobs`` are hashes of large values that this run has submitted before and that are not repeated; new ones are
    added to it. The time of the checkpoint is the one in its id: the payload has no other.
    """
    config: RunnableConfig = payload["config"]
    metadata: CheckpointMetadata = payload["metadata"]
    return _rows(
        thread_id,
        run_id,
        config,
        parent_config=payload.get("parent_config"),
        values=payload["values"],
        following=payload["next"],
        tasks=[_payload_task(task) for task in payload["tasks"]],
        parent_results=_results(parent_writes or {}, payload["values"]),
        metadata=get_checkpoint_metadata(config, metadata),
        created_at=_time_of(config["configurable"]["checkpoint_id"]),
        known_blobs=known_blobs,
    )


def state_rows(
    thread_id: str, run_id: uuid.UUID | None, state: StateSnapshot, known_blobs: set[bytes] | None = None
) -> list[Row]:
    """Rows for a state that was read with ``graph.aget_state``; none if the thread has no checkpoint."""
    if not state.config.get("configurable", {}).get("checkpoint_id"):
        return []
    return _rows(
        thread_id,
        run_id,
        state.config,
        parent_config=state.parent_config,
        values=state.values,
        following=state.next,
        tasks=[_state_task(task) for task in state.tasks],
        parent_results={},
        metadata=state.metadata or {},
        created_at=state.created_at or _time_of(state.config["configurable"]["checkpoint_id"]),
        known_blobs=known_blobs,
    )


def interrupts_by_task(state: StateSnapshot) -> dict[str, list[dict[str, Any]]]:
    """What waits for an answer, as threads show it: ``{task_id: [{id, value}]}``."""
    return {task.id: _interrupts(task.interrupts) for task in state.tasks if task.interrupts}


def _rows(
    thread_id: str,
    run_id: uuid.UUID | None,
    config: RunnableConfig,
    *,
    parent_config: RunnableConfig | None,
    values: object,
    following: Sequence[str],
    tasks: Sequence[Mapping[str, Any]],
    parent_results: Mapping[str, Any],
    metadata: Mapping[str, Any],
    created_at: str,
    known_blobs: set[bytes] | None,
) -> list[Row]:
    blobs: dict[bytes, bytes] = {}
    refs: dict[str, str] = {}
    inline: list[bytes] = []
    if isinstance(values, Mapping):
        for channel, value in values.items():
            body = to_json(value)
            if len(body) > INLINE_BYTES and isinstance(channel, str) and "\x00" not in channel:
                digest = hashlib.sha256(body).digest()
                blobs[digest] = body
                refs[channel] = digest.hex()
                body = b"null"
            inline.append(_key(channel) + b":" + body)
        values_json = b"{" + b",".join(inline) + b"}"
    else:  # a graph whose state is a single value
        values_json = to_json(values)
    known = known_blobs if known_blobs is not None else set()
    rows: list[Row] = [
        StateBlobRow(thread_id, digest, body) for digest, body in blobs.items() if digest not in known
    ]
    known.update(blobs)
    configurable = config["configurable"]
    rows.append(
        SnapshotRow(
            thread_id,
            configurable.get("checkpoint_ns", ""),
            configurable["checkpoint_id"],
            run_id,
            parent_config["configurable"].get("checkpoint_id") if parent_config else None,
            values_json,
            to_json(refs),
            to_json(following),
            to_json(tasks),
            _bounded(parent_results),
            to_json(metadata),
            created_at,
        )
    )
    return rows


def _results(writes_by_task: Mapping[str, Writes], values: object) -> dict[str, Any]:
    """The results of tasks as LangGraph's history has them: what each wrote to channels that readers see, which ``values``
    names, or what it returned. Tasks that have not ended have none."""
    results: dict[str, Any] = {}
    for task_id, writes in writes_by_task.items():
        if task_id == NULL_TASK_ID or any(channel in (ERROR, INTERRUPT) for channel, _ in writes):
            continue
        returned = [value for channel, value in writes if channel == RETURN]
        if returned:
            results[task_id] = returned[0]
        elif isinstance(values, Mapping):
            results[task_id] = map_task_result_writes([write for write in writes if write[0] in values])
    return results


def _bounded(results: Mapping[str, Any]) -> bytes:
    """The results as JSON, without those that are large: the state behind them has the same."""
    kept = {
        task_id: body for task_id, value in results.items() if len(body := to_json(value)) <= INLINE_BYTES
    }
    return b"{" + b",".join(_key(task_id) + b":" + body for task_id, body in kept.items()) + b"}"


def _payload_task(task: Mapping[str, Any]) -> dict[str, Any]:
    state = task.get("state")
    return {
        "id": task["id"],
        "name": task["name"],
        "path": None,
        "error": task.get("error"),
        "interrupts": _interrupts(task.get("interrupts") or ()),
        "checkpoint": state["configurable"] if isinstance(state, Mapping) else None,
        "state": None,
        "result": task.get("result"),
    }


def _state_task(task: PregelTask) -> dict[str, Any]:
    config = task.state.config if isinstance(task.state, StateSnapshot) else task.state
    return {
        "id": task.id,
        "name": task.name,
        "path": task.path,
        "error": None if task.error is None else str(task.error),
        "interrupts": _interrupts(task.interrupts),
        "checkpoint": _checkpoint(config) if config else None,
        "state": None,
        "result": task.result,
    }


def _checkpoint(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("thread_id", "checkpoint_ns", "checkpoint_id")
    return {name: config["configurable"][name] for name in names if name in config["configurable"]}


def _interrupts(interrupts: Iterable[Interrupt | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As the SDK has them; a schema for the answer only if the graph gives one."""
    shown = []
    for each in interrupts:
        told = (
            each
            if isinstance(each, Mapping)
            else {name: getattr(each, name) for name in ("id", "value", "response_schema")}
        )
        schema = told.get("response_schema")
        shown.append(
            {"id": told["id"], "value": told["value"], **({"response_schema": schema} if schema else {})}
        )
    return shown


def _key(channel: object) -> bytes:
    return to_json(channel if isinstance(channel, str) else str(channel))


def _time_of(checkpoint_id: str) -> str:
    """The time in a version 6 UUID, to the microsecond, in ISO 8601; the present time for any other id."""
    try:
        number = uuid.UUID(checkpoint_id)
    except ValueError:
        return datetime.now(UTC).isoformat()
    if number.version != 6:
        return datetime.now(UTC).isoformat()
    ticks = ((number.int >> 80) << 12) | ((number.int >> 64) & 0x0FFF)
    return (_UUID_EPOCH + timedelta(microseconds=ticks // 10)).isoformat()
