"""A run as the SDK expects to read it."""

from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from sandfleet.functions.api.responses import utc
from sandfleet.shared.store.runs import Run

SELECTABLE = (
    "run_id",
    "thread_id",
    "assistant_id",
    "created_at",
    "updated_at",
    "status",
    "metadata",
    "kwargs",
    "multitask_strategy",
)


def run_view(run: Run) -> dict[str, Any]:
    """The run object of a stored run."""
    return run_view_of(
        run_id=run.run_id,
        thread_id=run.thread_id,
        assistant_id=run.assistant_id,
        status=run.status,
        strategy=run.multitask_strategy,
        parent_run=run.parent_run,
        kwargs=orjson.loads(run.kwargs),
        metadata=orjson.loads(run.metadata),
        created_at=run.created_at,
        updated_at=run.updated_at,
    )


def run_view_of(
    *,
    run_id: UUID,
    thread_id: UUID,
    assistant_id: UUID,
    status: str,
    strategy: str,
    parent_run: UUID | None,
    kwargs: dict[str, Any],
    metadata: dict[str, Any],
    created_at: datetime,
    updated_at: datetime,
) -> dict[str, Any]:
    """The run object from its parts."""
    return {
        "run_id": run_id,
        "thread_id": thread_id,
        "assistant_id": assistant_id,
        "status": status,
        "metadata": metadata,
        "kwargs": _kwargs(kwargs, metadata),
        "multitask_strategy": strategy,
        "created_at": utc(created_at),
        "updated_at": utc(updated_at),
        "langsmith_session_name": None,
        **({} if parent_run is None else {"parent_run_id": parent_run}),
    }


def _kwargs(kwargs: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "input": kwargs["input"],
        "command": kwargs["command"],
        "config": {**kwargs["config"], "metadata": metadata},
        "context": kwargs["context"],
        "stream_mode": kwargs["stream_mode"],
        "interrupt_before": kwargs["interrupt_before"],
        "interrupt_after": kwargs["interrupt_after"],
        "webhook": None,
        "feedback_keys": None,
        "temporary": kwargs["temporary"],
        "subgraphs": kwargs["stream_subgraphs"],
        "resumable": kwargs["resumable"],
        "durability": kwargs["durability"],
        "checkpoint_during": kwargs["checkpoint_during"],
    }
