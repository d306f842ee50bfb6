"""Whole runs through the SDK: what a user asks for is what happens, and PostgreSQL says the same."""

import asyncio
from uuid import UUID

import httpx
import pytest
from langgraph_sdk.errors import ConflictError, NotFoundError
from redis.asyncio import Redis

from sandfleet.shared.streams.entry import decode, stream_key
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually


async def finished(client, thread_id, run_id):
    """The run, once it has ended."""

    async def ended():
        run = await client.runs.get(thread_id, run_id)
        return run if run["status"] not in ("pending", "running") else None

    return await eventually(ended, what="the run's end")


async def test_a_run_gives_the_same_result_wherever_it_is_read(client, query):
    """Red when the state that readers see is not the one that the graph ended with."""
    thread = await client.threads.create()
    values = await client.runs.wait(thread["thread_id"], "counter", input={"steps": 4})
    assert values["digest"] == expected_digest(4)
    (run,) = await client.runs.list(thread["thread_id"])
    assert run["status"] == "success"
    assert await client.runs.join(thread["thread_id"], run["run_id"]) == values
    state = await client.threads.get_state(thread["thread_id"])
    assert (state["values"], state["next"]) == (values, [])
    assert (await client.threads.get(thread["thread_id"]))["values"] == values
    assert await query("select status from runs where run_id = %s", run["run_id"]) == [("success",)]


async def test_a_stateless_run_needs_no_thread(client):
    """Red when the hidden thread is not made, or its result is gone before it is answered."""
    assert (await client.runs.wait(None, "counter", input={"steps": 2}))["done"] == [1, 2]


async def test_the_history_has_every_step(client):
    """Red when a state in between is not kept."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 3})
    history = await client.threads.get_history(thread["thread_id"], limit=50)
    assert [len(h["values"].get("done", [])) for h in history] == [3, 2, 1, 0, 0]
    assert [h["next"] for h in history] == [[], ["count"], ["count"], ["count"], ["__start__"]]
    parents = [h["parent_checkpoint"]["checkpoint_id"] for h in history[:-1]]
    assert parents == [h["checkpoint"]["checkpoint_id"] for h in history[1:]]


async def test_a_second_turn_goes_on_from_the_first(client):
    """Red when a run starts from an empty state although its thread has one."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 2})
    stream = client.runs.stream(thread["thread_id"], "counter", input={"steps": 4}, stream_mode="updates")
    taken = [step async for e in stream if e.event == "updates" for step in e.data["count"]["done"]]
    assert taken == [3, 4]


async def test_the_error_of_a_graph_is_the_error_of_the_run(client):
    """Red when the type or the message is lost, or the thread stays busy."""
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "fails", input={"message": "no such luck"})
    assert (await finished(client, thread["thread_id"], run["run_id"]))["status"] == "error"
    answer = await client.runs.join(thread["thread_id"], run["run_id"])
    assert answer["__error__"] == {"error": "ValueError", "message": "no such luck"}
    thread = await client.threads.get(thread["thread_id"])
    assert thread["status"] == "error"
    events = [e async for e in client.runs.join_stream(thread["thread_id"], run["run_id"], last_event_id="0")]
    assert [e.event for e in events][-2:] == ["error", "end"]


async def test_a_graph_that_exits_the_process_fails_only_its_own_run(client):
    """Red when SystemExit from a node ends the event loop of the graphs."""
    with pytest.raises(Exception, match="SystemExit"):
        await client.runs.wait(None, "fails", input={"message": "bye", "kind": "exit"})
    assert (await client.runs.wait(None, "counter", input={"steps": 1}))["done"] == [1]


async def test_an_interrupt_waits_for_its_answer(client):
    """Red when the interrupt is not stored with the thread, or the node before it runs again after the resume."""
    thread = await client.threads.create()
    values = await client.runs.wait(thread["thread_id"], "approve", input={"question": "Ship it?"})
    assert [i["value"] for i in values["__interrupt__"]] == [{"question": "Ship it?"}]
    found = await client.threads.get(thread["thread_id"])
    assert found["status"] == "interrupted"
    ((interrupt,),) = found["interrupts"].values()
    assert interrupt["value"] == {"question": "Ship it?"}
    state = await client.threads.get_state(thread["thread_id"])
    assert state["next"] == ["ask"]
    assert state["tasks"][0]["interrupts"][0]["id"] == interrupt["id"]
    values = await client.runs.wait(thread["thread_id"], "approve", command={"resume": 0})
    assert (values["answer"], values["asked"]) == (0, 1)
    assert (await client.threads.get(thread["thread_id"]))["status"] == "idle"


async def test_a_static_interrupt_stops_before_the_node(client):
    """Red when interrupt_before does not reach the graph."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "approve", input={}, interrupt_before=["prepare"])
    assert (await client.threads.get_state(thread["thread_id"]))["next"] == ["prepare"]
    values = await client.runs.wait(thread["thread_id"], "approve", input=None)
    assert "__interrupt__" in values


async def test_a_state_is_updated_by_hand(client):
    """Red when the update is not made by an executor, or the graph does not go on from it."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 2})
    updated = await client.threads.update_state(thread["thread_id"], {"done": [3]}, as_node="count")
    state = await client.threads.get_state(thread["thread_id"])
    assert state["checkpoint"]["checkpoint_id"] == updated["checkpoint"]["checkpoint_id"]
    assert state["values"]["done"] == [1, 2, 3]
    assert len(await client.runs.list(thread["thread_id"])) == 1


async def test_a_run_can_fork_from_an_earlier_checkpoint(client):
    """Red when the checkpoint of the request is ignored."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 3})
    history = await client.threads.get_history(thread["thread_id"], limit=50)
    early = next(h for h in history if h["values"].get("done") == [1])
    values = await client.runs.wait(
        thread["thread_id"], "counter", input={"steps": 2}, checkpoint_id=early["checkpoint"]["checkpoint_id"]
    )
    assert values["done"] == [1, 2]


async def test_config_and_context_reach_a_factory_per_run(client):
    """Red when a factory's graph is shared: the second caller would be greeted by the first one's name."""
    for name in ("Ada", "Bob"):
        values = await client.runs.wait(None, "factory", input={}, config={"configurable": {"name": name}})
        assert values["greeting"] == f"Hello {name}"


@pytest.mark.parametrize("kind", ["nul", "surrogate", "nan", "huge_int", "bytes", "deep"])
async def test_values_that_json_cannot_hold_never_break_a_run(client, kind):
    """Red when a value of a graph reaches PostgreSQL or a stream as it is."""
    thread = await client.threads.create()
    events = [
        e
        async for e in client.runs.stream(
            thread["thread_id"],
            "odd",
            input={"kind": kind},
            stream_mode=["values", "updates", "custom", "debug"],
        )
    ]
    assert events[-1].event == "end"
    state = await client.threads.get_state(thread["thread_id"])
    assert state["values"]["intact"] is True


async def test_a_delayed_run_starts_when_it_is_due(client):
    """Red when after_seconds is ignored, or nobody releases the run."""
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "counter", input={"steps": 1}, after_seconds=1)
    assert (await client.threads.get(thread["thread_id"]))["status"] == "busy"
    done = await finished(client, thread["thread_id"], run["run_id"])
    assert done["status"] == "success"


async def test_runs_of_one_thread_wait_for_each_other(client):
    """Red when two runs work on a thread at once: a step would be lost."""
    thread = await client.threads.create()
    runs = [
        await client.runs.create(
            thread["thread_id"], "counter", input={"steps": 2 * n}, multitask_strategy="enqueue"
        )
        for n in (1, 2, 3)
    ]
    for run in runs:
        assert (await finished(client, thread["thread_id"], run["run_id"]))["status"] == "success"
    assert (await client.threads.get_state(thread["thread_id"]))["values"]["done"] == [1, 2, 3, 4, 5, 6]


async def test_a_busy_thread_rejects_if_asked_to(client):
    """Red when reject is taken for enqueue."""
    thread = await client.threads.create()
    first = await client.runs.create(thread["thread_id"], "slow", input={"seconds": 20})
    with pytest.raises(ConflictError):
        await client.runs.create(thread["thread_id"], "slow", input={}, multitask_strategy="reject")
    await client.runs.cancel(thread["thread_id"], first["run_id"], wait=True)


async def test_interrupting_makes_room_for_the_next_run(client):
    """Red when multitask_strategy=interrupt leaves the first run going."""
    thread = await client.threads.create()
    first = await client.runs.create(thread["thread_id"], "slow", input={"seconds": 60})
    second = await client.runs.create(
        thread["thread_id"], "slow", input={"seconds": 0.05}, multitask_strategy="interrupt"
    )
    assert (await finished(client, thread["thread_id"], second["run_id"]))["status"] == "success"
    assert (await client.runs.get(thread["thread_id"], first["run_id"]))["status"] == "interrupted"


async def test_rolling_back_leaves_no_trace_of_the_first_run(client):
    """Red when multitask_strategy=rollback keeps the first run's steps."""
    thread = await client.threads.create()
    first = await client.runs.create(thread["thread_id"], "counter", input={"steps": 1000, "delay_ms": 20})

    async def has_begun():
        return (await client.threads.get_state(thread["thread_id"]))["values"].get("done")

    await eventually(has_begun, what="the first step")
    values = await client.runs.wait(
        thread["thread_id"], "counter", input={"steps": 2}, multitask_strategy="rollback"
    )
    assert values["done"] == [1, 2]
    with pytest.raises(NotFoundError):
        await client.runs.get(thread["thread_id"], first["run_id"])


async def test_the_timeout_ends_a_run(client, query):
    """Red when the hard timeout is not enforced by the executor."""
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "slow", input={"seconds": 60}, after_seconds=1)
    await query("update runs set timeout_s = 0.3 where run_id = %s", run["run_id"])
    done = await finished(client, thread["thread_id"], run["run_id"])
    assert done["status"] == "timeout"
    answer = await client.runs.join(thread["thread_id"], run["run_id"])
    assert answer["__error__"]["error"] == "RunTimeout"


async def last_of_stream(stack, run_id):
    """Id and events of the newest entry of a run's stream in Redis, None without one."""
    async with Redis.from_url(stack.info.redis_url) as redis:
        found = await redis.xrevrange(stream_key(UUID(run_id)), count=1)
    for entry_id, fields in found:
        return entry_id.decode(), [event.event for event in decode(entry_id, fields[b"e"])]
    return None


async def test_a_run_that_the_sweep_ends_is_announced_to_its_watchers(client, query, stack):
    """Red when the sweep tells nobody: the run had been begun, was given back, and is over its time limit now."""
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "counter", input={}, after_seconds=600)
    await query("update runs set started_at = created_at - interval '1 day' where run_id = %s", run["run_id"])
    await finished(client, thread["thread_id"], run["run_id"])
    assert await eventually(lambda: last_of_stream(stack, run["run_id"])) == ("1-1", ["error", "end"])


async def test_a_graph_that_blocks_the_loop_cannot_hold_its_run(client, query, stack, tmp_path):
    """Red when cancels are left to the graphs' event loop: the run would last as long as the blocking call."""
    thread = await client.threads.create()
    over = tmp_path / "over"
    run = await client.runs.create(thread["thread_id"], "blocking", input={"until": str(over)})
    try:
        await eventually(over.with_name(over.name + ".begun").exists, what="the block")
        await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)
        assert (await client.runs.get(thread["thread_id"], run["run_id"]))["status"] == "interrupted"
        assert await query("select attempt from runs where run_id = %s", run["run_id"]) == [(2,)]
        # Its watchers need not find that out by themselves.
        assert await eventually(lambda: last_of_stream(stack, run["run_id"])) == ("2-0", ["end"])
    finally:
        over.touch()
    # The slot comes back only with the coroutine: wait for it, so that the next test finds an idle executor.
    living = "heartbeat_at > clock_timestamp() - interval '15 s'"
    idle = f"select 1 from executors where {living} having sum(busy) = 0"
    await eventually(lambda: query(idle), what="the end of the blocking call")


async def test_timing_is_recorded_once_and_in_order(client, stack):
    """Red when a stage is invented or taken from another clock."""
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"], "messages", input={"messages": [{"role": "user", "content": "hi"}]}
    )
    await finished(client, thread["thread_id"], run["run_id"])
    async with httpx.AsyncClient(headers={"x-api-key": stack.info.api_key}) as http:
        timing = (await http.get(f"{stack.info.api_url}/runs/{run['run_id']}/timing")).json()
    stages = [
        "created_at",
        "started_at",
        "prepared_at",
        "first_model_request_at",
        "first_output_at",
        "finished_at",
    ]
    times = [timing[stage] for stage in stages]
    assert None not in times
    assert times == sorted(times)


async def test_two_resumes_at_once_execute_once(client):
    """Red when both run: the second must find the thread resumed and change nothing."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "approve", input={})
    answers = await asyncio.gather(
        *(client.runs.wait(thread["thread_id"], "approve", command={"resume": n}) for n in (1, 2))
    )
    assert answers[0]["answer"] == answers[1]["answer"]
    assert answers[0]["asked"] == 1
