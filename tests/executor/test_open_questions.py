"""What a thread says to be asked is what its state says, however a run ends that went on from a question."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt

from sandfleet.fleet.executor.execution import Execution, Stop
from sandfleet.shared.errors import Superseded
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import end_attempt
from sandfleet.shared.store.sweep import sweep
from tests.executor.conftest import Executor
from tests.executor.test_execution import State

OPEN, BEHIND = "beside an open question", "behind all questions"


class Asking:
    """A graph that asks two questions side by side. Whoever has the first answer is at work until told how that ends: at once,
    so that the second is still open, or in the step behind both."""

    def __init__(self, where: str) -> None:
        self.at_work = asyncio.Event()
        self.error: Exception | None = None
        self.go_on = asyncio.Event()

        async def work(_: State) -> State:
            self.at_work.set()
            await self.go_on.wait()
            if self.error is not None:
                raise self.error
            return {}

        async def ask(state: State) -> State:
            interrupt("first?")
            return await work(state) if where == OPEN else {}

        async def beside(_: State) -> State:
            interrupt("beside?")
            return {}

        builder = StateGraph(State).add_node(ask).add_node(beside).add_node(work)
        builder.add_edge(START, "ask").add_edge(START, "beside")
        builder.add_edge(["ask", "beside"], "work").add_edge("work", END)
        self.graph = builder.compile()


async def asked(executor: Executor, execution: Execution) -> tuple[str, dict[str, str]]:
    """Status of the run's thread, and its questions with their ids."""
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute(
            "select status, interrupts from threads where thread_id = %s", (execution.run.thread_id,)
        )
        row = await cursor.fetchone()
    assert row is not None
    return row[0], {each["value"]: each["id"] for task in row[1].values() for each in task}


async def answer(
    executor: Executor, asking: Asking, where: str, durability: str = "sync"
) -> tuple[Execution, "asyncio.Task[Any]"]:
    """A run that is at work behind the first answer, or behind both."""
    asks = await executor.claim(asking.graph)
    await asks.execute()
    status, questions = await asked(executor, asks)
    assert (status, set(questions)) == ("interrupted", {"first?", "beside?"})
    answers = {questions[name]: 1 for name in (["first?"] if where == OPEN else questions)}
    resumes = await executor.claim(
        asking.graph,
        thread_id=asks.run.thread_id,
        input=None,
        command={"resume": answers},
        durability=durability,
    )
    running = asyncio.create_task(resumes.execute())
    await asking.at_work.wait()
    return resumes, running


async def cancelled(executor: Executor, asking: Asking, resumes: Execution) -> None:
    resumes.stop(Stop.INTERRUPT)


async def out_of_time(executor: Executor, asking: Asking, resumes: Execution) -> None:
    resumes.stop(Stop.TIMEOUT)


async def failed(executor: Executor, asking: Asking, resumes: Execution) -> None:
    asking.error = ValueError("no")
    asking.go_on.set()


@pytest.mark.parametrize("durability", ["sync", "exit"])
@pytest.mark.parametrize("where", [OPEN, BEHIND])
@pytest.mark.parametrize(
    ("end", "status"), [(cancelled, "interrupted"), (out_of_time, "error"), (failed, "error")]
)
async def test_an_executor_that_ends_a_run_tells_what_is_open(
    executor: Executor, end: Callable[..., Awaitable[None]], status: str, where: str, durability: str
) -> None:
    """Red when the end empties the thread's interrupts: nobody who looks at threads would see that one is asked; and when it
    leaves them as they were, also for a run whose states are not kept as it goes on."""
    asking = Asking(where)
    resumes, running = await answer(executor, asking, where, durability)
    await end(executor, asking, resumes)
    await running
    found = await asked(executor, resumes)
    # An answer that was given by its question's id is kept in memory only: that question is open again.
    assert (found[0], set(found[1])) == (status, {"first?", "beside?"} if where == OPEN else set())


async def swept(executor: Executor, lost: Execution) -> None:
    """Over its time limit."""
    async with executor.world.pool.connection() as connection:
        await connection.execute(
            "update runs set started_at = clock_timestamp() - interval '1 year' where run_id = %s",
            (lost.run.fence.key.run_id,),
        )
        await sweep(connection, 5, 15, 3600)


async def ended_by_its_executor(executor: Executor, lost: Execution) -> None:
    async with executor.world.pool.connection() as connection:
        assert (await end_attempt(connection, lost.run.fence, "error", '{"error": "x", "message": "x"}'))[0]


async def cancelled_while_it_waits(executor: Executor, lost: Execution) -> None:
    async with executor.world.pool.connection() as connection:
        await connection.execute(
            "update runs set status = 'pending', lease_owner = null, lease_expires_at = null where run_id = %s",
            (lost.run.fence.key.run_id,),
        )
    await request_cancel(executor.world.pool, lost.run.fence.key, "interrupt")


async def cancelled_before_its_next_attempt(executor: Executor, lost: Execution) -> None:
    again = await executor.claim_again(lost, Asking(BEHIND).graph)
    again.stop(Stop.INTERRUPT)
    await again.execute()


@pytest.mark.parametrize("where", [OPEN, BEHIND])
@pytest.mark.parametrize(
    "end", [swept, ended_by_its_executor, cancelled_while_it_waits, cancelled_before_its_next_attempt]
)
async def test_a_run_that_ends_without_its_graph_leaves_what_its_state_says(
    executor: Executor, end: Callable[..., Awaitable[None]], where: str
) -> None:
    """Red when the thread keeps the questions that the run was to answer: they would be shown though it has gone past them."""
    asking = Asking(where)
    resumes, running = await answer(executor, asking, where)
    asking.error = Superseded("The executor is lost here.")
    asking.go_on.set()
    await running
    await end(executor, resumes)
    found = await asked(executor, resumes)
    assert found[0] in ("error", "interrupted")
    assert set(found[1]) == ({"first?", "beside?"} if where == OPEN else set())
