"""Group commit: what arrives while a transaction for the same key is under way shares the next one.

Worth it where transactions queue on one row anyway, as a tenant's do: the row is held until the commit has reached the
disk, so one by one they are bounded by the disk's latency.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import psycopg
from psycopg_pool import PoolTimeout

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_MOST = 20  # items in one transaction, which holds the row for less than a millisecond each


class _Waiting(NamedTuple, Generic[Item, Answer]):
    item: Item
    done: "asyncio.Future[Answer]"


class GroupCommit(Generic[Item, Answer]):
    """One per event loop. ``commit`` does up to 20 items of one key in one transaction, and returns their answers in
    order once it is committed.

    When PostgreSQL refuses a transaction, each of its items is tried alone, since one of them is at fault. When it does
    not answer, all that wait for the key fail with that: nobody waits for a dead server behind others.
    """

    def __init__(self, commit: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]) -> None:
        self._commit = commit
        # By key, while a transaction is under way: what waits for the next one.
        self._queues: dict[str, list[_Waiting[Item, Answer]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def do(self, key: str, item: Item) -> Answer:
        """Commit an item with others of its key. Keys do not wait for one another. Raises what ``commit`` raises.

        Who is cancelled while waiting leaves the others alone; its own item may be committed all the same.
        """
        waiting = _Waiting[Item, Answer](item, asyncio.get_running_loop().create_future())
        if key in self._queues:
            self._queues[key].append(waiting)
        else:
            self._queues[key] = [waiting]
            task = asyncio.create_task(self._serve(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await waiting.done

    async def _serve(self, key: str) -> None:
        queue = self._queues[key]
        group: list[_Waiting[Item, Answer]] = []
        try:
            while queue:
                group, queue[:] = queue[:_MOST], queue[_MOST:]
                await self._try(group)
        except Exception as error:
            for each in (*group, *queue):
                _fail(each, error)
        finally:
            del self._queues[key]
            for each in (*group, *queue):  # only where this task was cancelled: the loop ends
                each.done.cancel()

    async def _try(self, group: Sequence[_Waiting[Item, Answer]]) -> None:
        """Give each its answer, or what its item is refused for. Raises when PostgreSQL does not answer."""
        wanted = [each for each in group if not each.done.done()]
        if not wanted:
            return
        try:
            answers = await self._commit([each.item for each in wanted])
        except Exception as error:
            if _no_answer(error):
                raise
            if len(wanted) == 1:
                _fail(wanted[0], error)
                return
            for each in wanted:
                await self._try([each])
            return
        for each, answer in zip(wanted, answers, strict=True):
            if not each.done.done():
                each.done.set_result(answer)


def _fail(waiting: _Waiting[Item, Answer], error: Exception) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)


def _no_answer(error: Exception) -> bool:
    """Whether nobody knows if the transaction was committed. A server that gives a reason has rolled it back, unless it
    was shutting down."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate[:2] in ("08", "57")
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | PoolTimeout | OSError)
