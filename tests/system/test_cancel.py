"""Cancelling: in the queue, in a stream, in a sandbox, twice and too late."""

import pytest
from langgraph_sdk.errors import NotFoundError

from tests.waiting import eventually


async def status_of(client, thread_id, run_id):
    return (await client.runs.get(thread_id, run_id))["status"]


async def test_a_queued_run_is_cancelled_before_anybody_claims_it(client):
    """Red when a pending run is only marked and its gates stay closed."""
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "slow", input={}, after_seconds=600)
    await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)
    assert await status_of(client, thread["thread_id"], run["run_id"]) == "interrupted"
    assert (await client.threads.get(thread["thread_id"]))["status"] == "idle"
    events = [
        e.event async for e in client.runs.join_stream(thread["thread_id"], run["run_id"], last_event_id="0")
    ]
    assert events == ["end"]


async def test_a_streaming_run_is_cancelled_and_its_stream_ends(client):
    """Red when the cancel does not reach the executor, or the stream stays open."""
    thread = await client.threads.create()
    created = []
    events = []
    async for event in client.runs.stream(
        thread["thread_id"],
        "slow",
        input={"seconds": 60},
        stream_mode="custom",
        on_run_created=created.append,
    ):
        events.append(event.event)
        if len(events) == 3:
            await client.runs.cancel(thread["thread_id"], created[0]["run_id"])
    assert events[-1] == "end"
    assert await status_of(client, thread["thread_id"], created[0]["run_id"]) == "interrupted"
    assert (await client.threads.get(thread["thread_id"]))["status"] == "interrupted"


async def test_what_a_model_had_written_is_kept_when_the_run_is_cancelled(client, query):
    """Red when the partial text goes with the run."""
    thread = await client.threads.create()
    prompt = 'hi #script:{"words": 2000, "chunk_delay_ms": 20}'
    created, tokens = [], 0
    async for event in client.runs.stream(
        thread["thread_id"],
        "messages",
        input={"messages": [{"role": "user", "content": prompt}]},
        stream_mode="messages-tuple",
        on_run_created=created.append,
    ):
        tokens += event.event == "messages"
        if event.event == "messages" and tokens == 5:
            await client.runs.cancel(thread["thread_id"], created[0]["run_id"])
    ((partial,),) = await query("select partial from runs where run_id = %s", created[0]["run_id"])
    assert partial[0]["content"].startswith("w0 w1")


async def test_a_command_in_a_sandbox_dies_with_its_run(client, query, stack):
    """Red when the cancel leaves the sandbox behind: the leak check after this test finds it."""
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"],
        "sandboxed",
        input={"commands": ["echo begun; sleep 300"]},
        stream_mode=["tools", "updates"],
    )
    await eventually(lambda: query("select 1 from hosts where sandboxes > 0"), what="a sandbox")
    await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)
    assert await status_of(client, thread["thread_id"], run["run_id"]) == "interrupted"


async def test_cancelling_twice_and_too_late_answers_not_found(client):
    """Red when a cancel of a finished run changes its status."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 1})
    (run,) = await client.runs.list(thread["thread_id"])
    for _ in range(2):
        with pytest.raises(NotFoundError):
            await client.runs.cancel(thread["thread_id"], run["run_id"])
    assert await status_of(client, thread["thread_id"], run["run_id"]) == "success"


async def test_rollback_removes_the_run_and_its_steps(client):
    """Red when action=rollback only interrupts."""
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "counter", input={"steps": 1})
    run = await client.runs.create(thread["thread_id"], "counter", input={"steps": 1000, "delay_ms": 20})

    async def has_begun():
        return len((await client.threads.get_state(thread["thread_id"]))["values"]["done"]) > 2

    await eventually(has_begun, what="some steps")
    await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True, action="rollback")
    with pytest.raises(NotFoundError):
        await client.runs.get(thread["thread_id"], run["run_id"])
    assert (await client.threads.get_state(thread["thread_id"]))["values"]["done"] == [1]
    assert (await client.threads.get(thread["thread_id"]))["status"] == "idle"


async def test_a_client_that_leaves_for_good_takes_the_run_with_it_if_asked(client):
    """Red when on_disconnect=cancel is ignored."""
    thread = await client.threads.create()
    created = []
    async for _ in client.runs.stream(
        thread["thread_id"],
        "slow",
        input={"seconds": 120},
        stream_mode="custom",
        on_disconnect="cancel",
        on_run_created=created.append,
    ):
        break

    async def interrupted():
        return await status_of(client, thread["thread_id"], created[0]["run_id"]) == "interrupted"

    await eventually(interrupted, what="the run's end after its client left")
