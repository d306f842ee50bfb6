"""From a request to an accepted run: the assistant's and the caller's settings merged, one transaction, executors woken."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson
from starlette.requests import Request

from sandfleet.functions.api.request_context import note, traceparent
from sandfleet.functions.api.requests import caller, idempotency, parse_id, resources
from sandfleet.functions.api.run_body import RunBody
from sandfleet.functions.api.run_view import run_view, run_view_of
from sandfleet.shared.errors import BadRequest, Conflict, InvalidRequest, NotFound
from sandfleet.shared.ids import Owner, RunKey, new_id
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store import runs
from sandfleet.shared.store.assistants import Runnable
from sandfleet.shared.store.submission import Accepted, Submission, submit_on
from sandfleet.shared.streams.announce import announce_ends
from sandfleet.shared.templates import CONFIG_KEY, choose

# What only the server says about a run; a caller's values for these are replaced.
_RESERVED = (
    "thread_id",
    "run_id",
    "assistant_id",
    "graph_id",
    "user_id",
    "checkpoint_id",
    "checkpoint_ns",
    "checkpoint_map",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is ready to be submitted. ``kwargs`` is what the executor gets."""

    submission: Submission
    kwargs: dict[str, Any]
    cancels_on_disconnect: bool


@dataclass(frozen=True, slots=True)
class Created:
    """A run that was accepted, now or by an earlier request with the same Idempotency-Key."""

    run_id: UUID
    thread_id: UUID
    plan: Plan
    accepted: Accepted


def _parent(request: Request) -> UUID | None:
    """The run that this one is a child of: the SDK's clients pass the header on by ``headers=``."""
    given = request.headers.get("x-parent-run-id")
    if given is None:
        return None
    return parse_id(given, "X-Parent-Run-Id")


async def plan(
    request: Request, thread_id: UUID | None, body: RunBody, run_class: int, raw: bytes | None = None
) -> Plan:
    """Work out what to submit. ``thread_id`` None means a stateless run, on a hidden thread of its own; ``raw`` is the
    request's body when it may carry an Idempotency-Key.

    Raises NotFound, InvalidRequest and BadRequest as the dialect has them.
    """
    owner = caller(request)
    found = resources(request)
    assistant = await found.known_assistants.find(owner, body.assistant_id)
    stateless = thread_id is None
    if not stateless and "on_completion" in body.model_fields_set and body.on_completion == "delete":
        raise InvalidRequest("on_completion: 'delete' is for stateless runs; delete the thread yourself")
    key = RunKey(owner.tenant, owner.user_id, new_id())
    thread = thread_id or new_id()
    temporary = stateless and body.on_completion == "delete"
    config, context = _merged(assistant, body)
    checkpoint = _checkpoint(body, thread)
    if assistant.sandbox_templates is not None:
        choose(assistant.graph_id, assistant.sandbox_templates, config["configurable"].get(CONFIG_KEY))
    config["configurable"] |= {
        "thread_id": str(thread),
        "run_id": str(key.run_id),
        "assistant_id": str(assistant.assistant_id),
        "graph_id": assistant.graph_id,
        "user_id": owner.user_id,
    }
    kwargs = {
        "on_disconnect": body.on_disconnect,  # first: see runs.CANCELS_ON_DISCONNECT
        "input": body.input,
        "command": body.command.given() if body.command else None,
        "config": config,
        "context": context,
        "stream_mode": body.stream_modes(),
        "stream_subgraphs": body.stream_subgraphs,
        "interrupt_before": body.interrupt_before or None,
        "interrupt_after": body.interrupt_after or None,
        "checkpoint": checkpoint,
        "durability": body.durability if body.checkpoint_during else "exit",
        "checkpoint_during": body.checkpoint_during,
        "resumable": body.stream_resumable,
        "temporary": temporary,
    }
    if parent_span := traceparent():
        kwargs["traceparent"] = parent_span
    metadata = {
        "graph_id": assistant.graph_id,
        "assistant_id": str(assistant.assistant_id),
        **body.config.metadata,
        **body.metadata,
    }
    idempotency_key, request_hash = (None, None) if raw is None else idempotency(request, raw)
    submission = Submission(
        key=key,
        thread_id=thread,
        assistant_id=assistant.assistant_id,
        graph_id=assistant.graph_id,
        pool=assistant.pool,
        kwargs=to_json(kwargs).decode(),
        base_metadata=assistant.metadata,
        metadata=to_json(metadata).decode(),
        run_class=run_class,
        strategy=body.multitask_strategy,
        create_thread=stateless or body.if_not_exists == "create",
        temporary=temporary,
        delay_s=body.after_seconds,
        timeout_s=found.settings.run_timeout_s,
        parent_run=_parent(request),
        idempotency_key=idempotency_key,
        request_hash=request_hash,
    )
    return Plan(submission, kwargs, body.on_disconnect == "cancel")


def _merged(assistant: Runnable, body: RunBody) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and context: the assistant's, and the run's over it. ``configurable`` and ``context`` mirror each other."""
    given = body.config.given()
    configurable = given.pop("configurable", {})
    if configurable and body.context:
        raise BadRequest("Give config.configurable or context, not both: they mirror each other.")
    base = orjson.loads(assistant.config)
    inherited = base.pop("configurable", {})
    base.pop("metadata", None)
    mirrored = {k: v for k, v in configurable.items() if k not in _RESERVED}
    config = {**base, **given, "configurable": {**inherited, **mirrored, **body.context}}
    context = {**orjson.loads(assistant.context), **mirrored, **body.context}
    return config, context


def _checkpoint(body: RunBody, thread: UUID) -> dict[str, Any] | None:
    """The checkpoint to go on from: named as such, by its id alone, or in ``config.configurable``."""
    configured = body.config.configurable.get("checkpoint_id") or ""
    if not isinstance(configured, str) or "\x00" in configured:
        raise InvalidRequest("config.configurable.checkpoint_id: must be a string without U+0000")
    return body.checkpoint.of_thread(thread, body.checkpoint_id or configured)


async def create(request: Request, planned: Plan) -> Created:
    """Submit one run and wake whoever has to know. Raises what `submission.submit_on` raises."""
    accepted = await resources(request).submitter.submit(planned.submission)
    return _accepted(request, planned, accepted)


async def create_all(request: Request, plans: list[Plan]) -> list[Created]:
    """Submit several runs in one transaction: all or none."""
    async with resources(request).pool.connection() as connection, connection.transaction():
        accepted = [await submit_on(connection, planned.submission) for planned in plans]
    return [_accepted(request, p, a) for p, a in zip(plans, accepted, strict=True)]


def _accepted(request: Request, planned: Plan, accepted: Accepted) -> Created:
    found = resources(request)
    note(run_id=str(accepted.run_id), thread_id=str(accepted.thread_id))
    if accepted.gate is None and not accepted.replayed:
        found.waker.wake(planned.submission.pool, traceparent=planned.kwargs.get("traceparent"))
    for run_id, action in accepted.stop.items():
        found.signal_cancel(run_id, action)
    found.waker.wake_all(accepted.ready)
    if accepted.ended:
        found.spawn(announce_ends(found.redis, found.settings, accepted.ended))
    return Created(accepted.run_id, accepted.thread_id, planned, accepted)


async def view(request: Request, owner: Owner, created: Created) -> dict[str, Any]:
    """The run object of a creation. A replayed one is read again; raises Conflict when it was deleted since."""
    if created.accepted.replayed:
        try:
            return run_view(await runs.get(resources(request).pool, owner, created.thread_id, created.run_id))
        except NotFound:
            raise Conflict("The run that this Idempotency-Key had created was deleted.") from None
    s = created.plan.submission
    return run_view_of(
        run_id=created.run_id,
        thread_id=created.thread_id,
        assistant_id=s.assistant_id,
        status="pending",
        strategy=s.strategy,
        parent_run=s.parent_run,
        kwargs=created.plan.kwargs,
        metadata=created.accepted.metadata or {},
        created_at=created.accepted.created_at,
        updated_at=created.accepted.created_at - timedelta(seconds=s.delay_s),
    )
