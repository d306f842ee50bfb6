"""Attempts of one run: how one begins where another ended, and what is an attempt's own end."""

import asyncio
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from langgraph import func
from langgraph.types import Command

from sandfleet.fleet.executor import execution as execution_module
from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.fleet.executor.metrics import ExecutorMetrics
from sandfleet.fleet.executor.node_tasks import cancel_until_ended
from sandfleet.fleet.executor.publisher import RunStream
from sandfleet.fleet.executor.run_request import build_input, head_config
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.errors import Superseded
from sandfleet.shared.ids import Fence
from sandfleet.shared.store.claims import renew
from sandfleet.shared.streams.entry import FIELD, decode, stream_key
from tests.executor.conftest import Executor
from tests.executor.test_execution import State, graph_of, number, step
from tests.waiting import eventually


async def test_watchers_of_a_run_that_was_taken_over_learn_so_before_its_work_begins(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red without the wait for the first event: a hundred runs that begin at once keep it for a second."""
    waiting: list[int] = []
    opened: list[RunStream] = []
    open_stream, build = executor.publisher.open, execution_module.build_config

    def opening(fence: Fence, checkpoint_id: str | None) -> RunStream:
        opened.append(open_stream(fence, checkpoint_id))
        return opened[0]

    def building(*args: Any) -> Any:
        waiting.append(len(opened[0]._buffer) + len(opened[0]._flight))
        return build(*args)

    monkeypatch.setattr(executor.publisher, "open", opening)
    monkeypatch.setattr(execution_module, "build_config", building)
    await (await executor.claim(graph_of(step), attempt=2)).execute()
    assert waiting == [0]


async def test_runs_that_are_claimed_together_begin_one_after_the_other(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when many first steps, which are all computation, hold the loop in one go."""
    turns = 0
    begun: list[int] = []
    build = execution_module.build_config

    def building(*args: Any) -> Any:
        begun.append(turns)
        return build(*args)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(execution_module, "build_config", building)
    executions = [await executor.claim(graph_of(step)) for _ in range(5)]
    counting = asyncio.create_task(count())
    await asyncio.gather(*(execution.execute() for execution in executions))
    counting.cancel()
    assert len(begun) == 5
    assert len(set(begun)) == 5


async def test_a_successor_goes_on_from_the_checkpoint_and_not_from_the_input(executor: Executor) -> None:
    """What the input adds to the state is there once. LangGraph itself sees to it by the run's id in the metadata; red when
    that is not given to it, and the input is given again."""
    seen: list[list[int]] = []

    async def node(state: State) -> State:
        seen.append(state["done"])
        if len(seen) == 2:
            raise Superseded("This attempt is lost.")
        return await step(state)

    graph = graph_of(node, steps=3)
    first = await executor.claim(graph, input={"done": [7]})
    await first.execute()
    second = await executor.claim_again(first, graph)
    await second.execute()
    assert seen == [[7], [7, 2], [7, 2]]
    assert (await executor.stored(second.run.fence.key))[0] == "success"


async def test_a_successor_gives_no_command_again(executor: Executor) -> None:
    """LangGraph would carry it out once more. Red when an attempt that goes on from a checkpoint gives it one."""
    run = replace((await executor.claim(graph_of(step))).run, kwargs={"command": {"goto": "node"}})
    assert build_input(run) == Command(goto="node")
    assert build_input(replace(run, resumes=True)) is None


async def test_the_end_of_an_attempt_leaves_the_next_one_alone(executor: Executor) -> None:
    """An executor that was frozen may claim a run again that it lost, before it has ended what it did for it. Red when the
    nodes of the run are cancelled, whatever their attempt: the step would count as taken, and the run as done."""
    at_work, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def node(state: State) -> State:
        at_work.release()
        await go_on.wait()
        return await step(state)

    first = await executor.claim(graph_of(node))
    running = asyncio.create_task(first.execute())
    await at_work.acquire()
    second = await executor.claim_again(first, graph_of(node))
    running_again = asyncio.create_task(second.execute())
    await at_work.acquire()
    first.stop(execution_module.Stop.SUPERSEDED)
    await running
    ending = asyncio.create_task(cancel_until_ended(first.run.fence))
    await asyncio.sleep(0)
    go_on.set()
    await running_again
    await ending
    assert (await executor.stored(second.run.fence.key))[:2] == ("success", None)
    assert (
        await number(
            executor,
            "select json_array_length(\"values\"->'done') from state_snapshots order by seq desc limit 1",
        )
        == 1
    )


@pytest.mark.parametrize("durability", ["exit", "sync"])
async def test_a_step_is_not_complete_without_a_node_that_was_cancelled(
    executor: Executor, durability: str
) -> None:
    """Whoever has cancelled it: not the run, nor LangGraph for another node's failure. Red when LangGraph takes the node for
    one that wrote nothing: the run ends as a success without its last step."""
    at_work = asyncio.Event()

    async def node(state: State) -> State:
        if state["done"]:
            at_work.set()
            await asyncio.Event().wait()
        return await step(state)

    graph = graph_of(node, steps=2)
    execution = await executor.claim(graph, input={"done": []}, durability=durability)
    running = asyncio.create_task(execution.execute())
    await at_work.wait()
    await cancel_until_ended(execution.run.fence)
    await running
    status, error, _ = await executor.stored(execution.run.fence.key)
    assert (status, error) == (
        "error",
        {"error": "NodeCancelledError", "message": "The node 'node' was cancelled while it was at work."},
    )
    kept = await graph.aget_state(head_config(execution.run, execution._saver))
    assert (kept.values, kept.next) == ({"done": [1]}, ("node",))


@pytest.mark.parametrize("durability", ["exit", "sync"])
async def test_a_call_that_its_caller_has_given_up_is_missed_by_nobody(
    executor: Executor, durability: str
) -> None:
    """Red when each task that was cancelled counts as a missing part of its step."""

    @func.task
    async def slow() -> int:
        await asyncio.Event().wait()
        return 1

    @func.entrypoint()
    async def graph(given: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"done": [await asyncio.wait_for(slow(), 0.01)]}
        except TimeoutError:
            return {"done": [7]}

    execution = await executor.claim(graph, durability=durability)
    await execution.execute()
    assert (await executor.stored(execution.run.fence.key))[:2] == ("success", None)


@pytest.mark.parametrize("rolled_back", [False, True], ids=["kept", "rolled back"])
@pytest.mark.parametrize("renewed", [False, True], ids=["before a renewal", "beside a renewal"])
async def test_an_end_whose_reply_was_lost_is_known_as_its_own(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, renewed: bool, rolled_back: bool
) -> None:
    """Red when the attempt is taken for superseded that has ended the run: by the second call, which finds it ended,
    or does not find it where it was undone, or by a renewal, which finds no running run any more. Its `end` would come late, its sandbox would be left to the host, and
    it would count as lost."""
    finish, answered = Finisher.finish, 0

    async def loses_the_first_reply(*given: Any) -> Any:
        nonlocal answered
        answer = await finish(*given)
        answered += 1
        if answered > 1:
            return answer
        if renewed:
            fence = execution.run.fence
            async with executor.world.pool.connection() as connection:
                renewal = await renew(connection, [fence], 60)
            assert fence not in renewal.held.keys() | renewal.locked
            execution.lease.superseded = True
            execution.stop(execution_module.Stop.SUPERSEDED)
        raise psycopg.OperationalError("the reply was lost")

    async def removes(sandbox: RunSandbox) -> None:
        removed.append(await sandbox._sign_token())

    removed: list[str] = []
    counted: list[str] = []
    monkeypatch.setattr(Finisher, "finish", loses_the_first_reply)
    monkeypatch.setattr(RunSandbox, "close", removes)
    monkeypatch.setattr(ExecutorMetrics, "ended", lambda _, run, ending, *rest: counted.append(ending.status))
    monkeypatch.setattr(ExecutorMetrics, "left", lambda _, run, why: counted.append(why))
    execution = await executor.claim(graph_of(step))
    if rolled_back:
        execution.stop(execution_module.Stop.ROLLBACK)
    await execution.execute()
    key = execution.run.fence.key

    async def shown() -> bool:
        ((entry_id, fields),) = await executor.world.redis.xrevrange(stream_key(key.run_id), count=1)
        return decode(entry_id, fields[FIELD.encode()])[-1].event == "end"

    await eventually(shown, what="the end in the stream")
    assert answered == 2
    assert counted == ["interrupted" if rolled_back else "success"]
    assert len(removed) == 1
    async with executor.world.pool.connection() as connection:
        cursor = await connection.execute("select status from runs where run_id = %s", (key.run_id,))
        assert await cursor.fetchall() == ([] if rolled_back else [("success",)])
    assert [event for _, event in await executor.world.journal(key)].count("end") == (not rolled_back)
