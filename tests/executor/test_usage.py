"""What a run has used of models is kept with its end, however it ends."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage

from sandfleet.fleet.executor import fenced_writer
from sandfleet.fleet.executor.execution import Execution, Stop
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import RunKey, new_id
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.submission import submit
from tests.executor.conftest import Executor
from tests.executor.test_control import executing, number
from tests.executor.test_execution import State, graph_of, step
from tests.gates.test_gates import pool, submission
from tests.waiting import eventually

__all__ = ["pool"]


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written for the time that has passed."""
    monkeypatch.setattr(fenced_writer, "PUT_OFF_S", 3600.0)


class Slow(GenericFakeChatModel):
    """A model that never answers."""

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.Event().wait()


def model(kind: type[GenericFakeChatModel] = GenericFakeChatModel) -> GenericFakeChatModel:
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    return kind(messages=iter(AIMessage("hi", usage_metadata=usage) for _ in range(9)))


async def kept(executor: Executor, key: RunKey) -> list[tuple[Any, ...]]:
    """Attempt, calls, those without tokens and input tokens of what is kept of a run."""
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            "select attempt, calls, unmetered_calls, input_tokens from run_usage where run_id = %s order by 1",
            (key.run_id,),
        )
        return await cursor.fetchall()


async def asks(state: State) -> State:
    await model().ainvoke([HumanMessage("hello")])
    return await step(state)


async def asks_and_fails(state: State) -> State:
    await model().ainvoke([HumanMessage("hello")])
    raise ValueError


@pytest.mark.parametrize("node", [asks, asks_and_fails])
async def test_usage_is_there_when_the_run_is_over(executor: Executor, node: Any) -> None:
    """Red when it neither goes along with what the run writes last nor is waited for."""
    execution = await executor.claim(graph_of(node))
    await execution.execute()
    key = execution.run.fence.key
    assert (await executor.stored(key))[0] == ("success" if node is asks else "error")
    assert await kept(executor, key) == [(1, 1, 0, 10)]


def synchronous(state: State) -> State:
    model().invoke([HumanMessage("hello")])
    return {"done": [1]}


async def test_calls_of_synchronous_nodes_are_kept(executor: Executor) -> None:
    """They are made in threads. Red when the writer is called from there."""
    execution = await executor.claim(graph_of(synchronous))
    await execution.execute()
    assert await kept(executor, execution.run.fence.key) == [(1, 1, 0, 10)]


async def broken_off(executor: Executor, reason: Stop) -> Execution:
    """A run that was stopped in its second model call."""
    begun = asyncio.Event()

    async def node(state: State) -> State:
        await model().ainvoke([HumanMessage("hello")])
        begun.set()
        await model(Slow).ainvoke([HumanMessage("hello")])
        return await step(state)

    execution = await executor.claim(graph_of(node))
    running = asyncio.create_task(execution.execute())
    await begun.wait()
    await eventually(
        lambda: execution.usage.rows()[0].calls == 1 and execution._watch.under_way, what="the call"
    )
    execution.stop(reason)
    await running
    return execution


@pytest.mark.parametrize(
    "reason", [Stop.INTERRUPT, Stop.ROLLBACK, Stop.TIMEOUT, Stop.HAND_OVER, Stop.NO_ROOM]
)
async def test_usage_of_a_run_that_is_broken_off_is_kept(executor: Executor, reason: Stop) -> None:
    """With the call that was under way, whose tokens nobody will tell; also of a run that is undone. Red when only a run's
    good end waits for it."""
    execution = await broken_off(executor, reason)
    assert await kept(executor, execution.run.fence.key) == [(1, 2, 1, 10)]


async def test_a_successor_adds_to_what_was_used_before(executor: Executor) -> None:
    """Red when an attempt replaces the account of the one before."""
    lost = await broken_off(executor, Stop.HAND_OVER)
    successor = await executor.claim_again(lost, graph_of(asks))
    await successor.execute()
    assert await kept(executor, lost.run.fence.key) == [(1, 2, 1, 10), (2, 1, 0, 10)]


async def test_usage_of_a_run_whose_graph_holds_the_loop_is_kept(
    database: str, redis_url: str, pool: Pool
) -> None:
    """The control loop ends it, and the run's own writes come too late. Red when the control loop does not write it."""
    begun, go_on = threading.Event(), threading.Event()

    async def node(state: State) -> State:
        await model().ainvoke([HumanMessage("hello")])
        begun.set()
        go_on.wait()
        return await step(state)

    made = replace(submission("flood", new_id()), kwargs='{"input": {}}')
    async with executing(database, redis_url, slots=1, node=node):
        try:
            await submit(pool, made)
            await asyncio.to_thread(begun.wait)
            await request_cancel(pool, made.key, "interrupt")

            async def ended() -> bool:
                return await number(pool, "select count(*) from runs where status = 'interrupted'") == 1

            await eventually(ended, 60, "the end of the run")
            assert await number(pool, "select sum(input_tokens) from run_usage where tenant = 'flood'") == 10
        finally:
            go_on.set()


class Broken(GenericFakeChatModel):
    """A model that fails."""

    async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError


async def test_a_call_that_failed_is_counted_without_tokens(executor: Executor) -> None:
    """Its provider may charge it. Red when only calls that were answered are counted."""

    async def node(state: State) -> State:
        await model(Broken).ainvoke([HumanMessage("hello")])
        return await step(state)

    execution = await executor.claim(graph_of(node))
    await execution.execute()
    assert await kept(executor, execution.run.fence.key) == [(1, 1, 1, 0)]
