"""The spans of one run: itself, its wait in the queue, its nodes and its model calls.

Tool calls and sandboxes make theirs where they are made. All of it is a part of the run's trace, because the span of a run
and then of a node is the current one of the task that works on it, and of the tasks and threads which that one starts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from sandfleet.shared import tracing
from sandfleet.shared.prices import Usage
from sandfleet.shared.store.claims import ClaimedRun
from sandfleet.shared.tracing import Span

TRACEPARENT_KEY = "traceparent"
"""In a run's ``kwargs``: the span of the request that made it."""

_STEP_TAG = "graph:step:"  # LangGraph marks by it what is a node, beside the runnables within one
_MAX_NAME = 200

_model_call: ContextVar["_ModelSpan | None"] = ContextVar("sandfleet_model_span", default=None)


class _ModelSpan:
    __slots__ = ("open", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.open = True


@contextmanager
def of_run(run: ClaimedRun, pool: str, claimed: float) -> Iterator[Span]:
    """The block as the span of an attempt that was claimed at this monotonic time."""
    if not tracing.on():
        yield Span()
        return
    parent = tracing.parse(run.kwargs.get(TRACEPARENT_KEY))
    if run.ready_at is not None:
        waited_s = (run.claimed_at - run.ready_at).total_seconds()
        tracing.begin("queue", _about(run, pool), parent=parent, since=claimed - waited_s).end(claimed)
    with tracing.span("run", _about(run, pool), parent=parent, kind="consumer", since=claimed) as span:
        yield span


def _about(run: ClaimedRun, pool: str) -> dict[str, str | int]:
    key = run.fence.key
    return {
        "sandfleet.tenant": key.tenant,
        "sandfleet.run_id": str(key.run_id),
        "sandfleet.thread_id": str(run.thread_id),
        "sandfleet.attempt": run.fence.attempt,
        "sandfleet.graph": run.graph_id,
        "sandfleet.pool": pool,
    }


def traceparent() -> str | None:
    """What an outgoing request names as its parent: the model call that is under way in this task, else the current
    span."""
    call = _model_call.get()
    return call.span.traceparent if call is not None and call.open else tracing.current_traceparent()


class CallSpans(BaseCallbackHandler):
    """The callback that makes the spans of nodes and model calls. One per run, and only when traces are made.

    Its methods are plain functions that LangChain calls in the task or thread at work, so that what they make current is
    current there.
    """

    run_inline = True
    ignore_retriever = True
    ignore_agent = True
    ignore_custom_event = True

    def __init__(self) -> None:
        self._nodes: dict[UUID, Span] = {}
        self._models: dict[UUID, _ModelSpan] = {}

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, tags: list[str] | None = None, **kwargs: Any
    ) -> None:
        if any(tag.startswith(_STEP_TAG) for tag in tags or ()):
            name = str((kwargs.get("metadata") or {}).get("langgraph_node") or kwargs.get("name"))[:_MAX_NAME]
            span = tracing.begin(f"node {name}", {"sandfleet.node": name})
            span.make_current()
            self._nodes[run_id] = span

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        if span := self._nodes.pop(run_id, None):
            span.end()

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if span := self._nodes.pop(run_id, None):
            span.failed(type(error).__name__)
            span.end()

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: UUID, metadata: Any = None, **kwargs: Any
    ) -> None:
        known = metadata or {}
        model = str(known.get("ls_model_name") or "unknown")[:_MAX_NAME]
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.provider.name": str(known.get("ls_provider") or "unknown")[:_MAX_NAME],
        }
        call = self._models[run_id] = _ModelSpan(tracing.begin(f"chat {model}", about, kind="client"))
        _model_call.set(call)

    def on_llm_start(self, serialized: Any, prompts: Any, **kwargs: Any) -> None:
        self.on_chat_model_start(serialized, prompts, **kwargs)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        if (call := self._models.pop(run_id, None)) is None:
            return
        generation = response.generations[0][0] if response.generations and response.generations[0] else None
        if given := getattr(getattr(generation, "message", None), "usage_metadata", None):
            usage = Usage.of(given)
            call.span.set("gen_ai.usage.input_tokens", usage.input)
            call.span.set("gen_ai.usage.output_tokens", usage.output)
        _end(call, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if call := self._models.pop(run_id, None):
            _end(call, type(error).__name__)

    def close(self) -> None:
        """The run is over here: spans whose end nobody told end now."""
        while self._models:
            _end(self._models.popitem()[1], "abandoned")
        while self._nodes:
            span = self._nodes.popitem()[1]
            span.failed("abandoned")
            span.end()


def _end(call: _ModelSpan, error: str | None) -> None:
    call.open = False
    if error is not None:
        call.span.failed(error)
    call.span.end()
