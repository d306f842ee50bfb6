"""What one attempt of a run uses of models. It is kept in `run_usage`, by rows that go along with those that the run writes
anyway, at the latest with its end: a model call costs no statement."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from sandfleet.fleet.executor.fenced_rows import UsageRow
from sandfleet.fleet.executor.fenced_writer import FencedWriter, RowRefused
from sandfleet.shared.ids import Fence
from sandfleet.shared.prices import MOST_TOKENS, Price, Usage, cost_usd, price_of

MODELS = 32
"""Models of an attempt that are named; what it uses of more counts for `OTHER`. Their names come from graphs, and so from
whoever may configure them."""

OTHER = "other"

_NAME_LENGTH = 200


class RunUsage:
    """One per attempt, made on the event loop of ``writer``. ``counted`` is told the tokens of each call and what they cost
    in US dollars, None for a model without a price."""

    def __init__(
        self,
        fence: Fence,
        writer: FencedWriter,
        prices: Mapping[str, Price],
        counted: Callable[[Usage, float | None], None],
    ) -> None:
        self._fence = fence
        self._writer = writer
        self._prices = prices
        self._counted = counted
        self._lock = threading.Lock()
        self._of_model: dict[str, UsageRow] = {}
        self._told: list[UsageRow] = []
        self._written: asyncio.Future[None] | None = None

    def add(self, model: str, usage: Usage | None) -> None:
        """A model call has ended; with None nobody has told what it used. From any thread."""
        price = price_of(model, self._prices)
        cost = None if usage is None or price is None else cost_usd(usage, price)
        if usage is not None:
            self._counted(usage, cost)
        with self._lock:
            name = _storable(model)
            if name not in self._of_model and len(self._of_model) >= MODELS:
                name = OTHER
            before = self._of_model.get(name) or UsageRow(name, 0, 0, 0, 0, 0, 0, 0, 0.0)
            self._of_model[name] = _after(before, usage, cost)
        loop = self._writer.loop
        if loop is _running_loop():
            self._put_off()
        else:
            # In order with what the node that made the call writes. When the loop is closed nobody writes any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._put_off)

    def rows(self) -> list[UsageRow]:
        """All that was used so far. From any thread."""
        with self._lock:
            return list(self._of_model.values())

    def _put_off(self) -> None:
        self._told = self.rows()
        self._written = self._writer.put_off(self._fence, self._told)

    async def settle(self) -> None:
        """Until all is committed. Raises Superseded or ExecutorStopped."""
        if self._told != self.rows():
            self._put_off()
        if self._written is None:
            return
        self._writer.submit_put_off(self._fence)
        try:
            await asyncio.shield(self._written)
        except RowRefused:  # a row that these went along with
            await self._writer.write(self._fence, self.rows())


def _after(before: UsageRow, usage: Usage | None, cost: float | None) -> UsageRow:
    """The row with one more call."""
    if usage is None:
        return before._replace(calls=before.calls + 1, unmetered_calls=before.unmetered_calls + 1)
    return UsageRow(
        before.model,
        before.calls + 1,
        before.unmetered_calls,
        before.unpriced_calls + (cost is None),
        _sum(before.input_tokens, usage.input),
        _sum(before.output_tokens, usage.output),
        _sum(before.cache_read_tokens, usage.cache_read),
        _sum(before.cache_creation_tokens, usage.cache_creation),
        before.cost_usd + (cost or 0.0),
    )


def _sum(before: int, more: int) -> int:
    return min(before + more, MOST_TOKENS)


def _storable(model: str) -> str:
    """A model's name as PostgreSQL can hold it: a checkpoint may be in the same write, and must not fail for it."""
    return model[:_NAME_LENGTH].replace("\0", "\ufffd").encode(errors="replace").decode()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
