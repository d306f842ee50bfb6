"""The callback that sees a run's model calls: it holds them back while the lease is in doubt, and takes times."""

import time
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler

from sandfleet.fleet.executor.lease import Lease


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

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.first_model_request: float | None = None
        self.first_output: float | None = None

    async def _before_model(self) -> None:
        if self._lease.in_doubt():
            await self._lease.certain()
        if self.first_model_request is None:
            self.first_model_request = time.monotonic()

    async def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        await self._before_model()

    async def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        await self._before_model()

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, **kwargs: Any) -> None:
        if self.first_output is None and (token or _has_output(getattr(chunk, "message", None))):
            self.first_output = time.monotonic()

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        if self.first_output is None and response.generations and response.generations[0]:
            generation = response.generations[0][0]
            if generation.text or _has_output(getattr(generation, "message", None)):
                self.first_output = time.monotonic()


def _has_output(message: Any) -> bool:
    """Whether a message (chunk) carries text, a tool call or reasoning."""
    return message is not None and bool(
        message.content
        or getattr(message, "tool_call_chunks", None)
        or getattr(message, "tool_calls", None)
        or message.additional_kwargs.get("reasoning_content")
    )
