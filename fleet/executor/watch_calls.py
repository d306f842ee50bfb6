"""The callback that sees a run's model calls: it holds them back while the lease is in doubt, takes times, and counts."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from sandfleet.fleet.executor import metrics
from sandfleet.fleet.executor.lease import Lease
from sandfleet.shared.prices import Usage


class _Call(NamedTuple):
    begun: float
    model: str


class CallWatch(BaseCallbackHandler):
    """One per run. ``first_model_request`` and ``first_output`` are monotonic times, None until they happen.

    The first output is the first non-empty text, reasoning or tool call that a model gives. LangChain awaits the
    handlers that are coroutines; the ones called for each token are plain functions, since those cost less.
    """

    raise_error = True
    run_inline = True
    ignore_agent = True  # tools: the ledger sees to them
    ignore_chain = True
    ignore_retriever = True
    ignore_custom_event = True

    def __init__(self, lease: Lease, used: Callable[[str, Usage | None], None]) -> None:
        """``used`` is told the model and the tokens of each call that has ended; None if nobody has told these, as for
        calls that failed or were broken off, and by providers that send none."""
        self._lease = lease
        self._used = used
        self._calls: dict[UUID, _Call] = {}
        self.first_model_request: float | None = None
        self.first_output: float | None = None
        self.error: BaseException | None = None
        """What the last model call that failed has raised."""

    async def _before_model(self, run_id: UUID, metadata: dict[str, Any] | None) -> None:
        if self._lease.in_doubt():
            await self._lease.certain()
        now = time.monotonic()
        if self.first_model_request is None:
            self.first_model_request = now
        self._calls[run_id] = _Call(now, str((metadata or {}).get("ls_model_name") or ""))
        metrics.model_call_begins()

    async def on_chat_model_start(
        self, *args: Any, run_id: UUID, metadata: Any = None, **kwargs: Any
    ) -> None:
        await self._before_model(run_id, metadata)

    async def on_llm_start(self, *args: Any, run_id: UUID, metadata: Any = None, **kwargs: Any) -> None:
        await self._before_model(run_id, metadata)

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        if self.first_output is None and (token or _has_output(getattr(chunk, "message", None))):
            self.first_output = time.monotonic()

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        generation = response.generations[0][0] if response.generations and response.generations[0] else None
        message = getattr(generation, "message", None)
        if self.first_output is None and generation is not None and (generation.text or _has_output(message)):
            self.first_output = time.monotonic()
        call = self._calls.pop(run_id, None)
        if call is not None:
            metrics.model_call_ends(call.begun, "ok")
            usage = getattr(message, "usage_metadata", None)
            answered_by = "" if message is None else message.response_metadata.get("model_name")
            self._used(call.model or answered_by or "", Usage.of(usage) if usage else None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.error = error
        call = self._calls.pop(run_id, None)
        if call is not None:
            cancelled = isinstance(error, (asyncio.CancelledError, GeneratorExit))
            metrics.model_call_ends(call.begun, "cancelled" if cancelled else "error")
            self._used(call.model, None)

    @property
    def under_way(self) -> bool:
        """Whether a model is being asked."""
        return bool(self._calls)

    def close(self) -> None:
        """The run is over here: calls whose end nobody told are under way no longer."""
        while self._calls:
            call = self._calls.popitem()[1]
            metrics.model_call_ends(call.begun, "cancelled")
            self._used(call.model, None)


def _has_output(message: Any) -> bool:
    """Whether a message (chunk) carries text, a tool call or reasoning."""
    return message is not None and bool(
        message.content
        or getattr(message, "tool_call_chunks", None)
        or getattr(message, "tool_calls", None)
        or message.additional_kwargs.get("reasoning_content")
    )
