"""A run that is taken back leaves its thread as it was before, also when it went on from an earlier run's checkpoint."""

from pathlib import Path

import pytest
from langgraph_sdk.errors import NotFoundError

from tests.waiting import eventually


def asked(thread):
    """The questions that wait for an answer, each with its interrupt's id."""
    return {each["value"]: each["id"] for task in thread["interrupts"].values() for each in task}


async def shown(client, thread_id):
    """What clients see of a thread, but for times."""
    thread = await client.threads.get(thread_id)
    state = await client.threads.get_state(thread_id)
    return {name: thread.get(name) for name in ("status", "interrupts", "values", "error")}, state


async def test_a_resuming_run_that_is_rolled_back_takes_its_answers_along(client, query, tmp_path):
    """The questions are open again, and nobody has answered them. Red when only the run's own checkpoints are erased: its
    answers and what its tasks came to hang on the checkpoint before; and when its end empties the thread's interrupts."""
    hold = tmp_path / "hold"
    thread_id = (await client.threads.create())["thread_id"]
    await client.runs.wait(thread_id, "questions", input={"both": True, "hold": str(hold)})
    before = await shown(client, thread_id)
    questions = asked(before[0])
    assert set(questions) == {"first?", "beside?"}
    answers = {questions["first?"]: "taken back", questions["beside?"]: "taken back"}
    run = await client.runs.create(thread_id, "questions", command={"resume": answers})

    async def task_ended():
        return await query(
            """select 1 from checkpoint_writes where slot = 0 and checkpoint_id = (
                 select checkpoint_id from checkpoints where thread_id = %s order by seq desc limit 1)""",
            thread_id,
        )

    await eventually(lambda: Path(f"{hold}.held").exists(), what="the first answer taken")
    await eventually(task_ended, what="the other task's output")
    await client.runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    with pytest.raises(NotFoundError):
        await client.runs.get(thread_id, run["run_id"])
    assert await shown(client, thread_id) == before
    hold.touch()
    await client.runs.wait(thread_id, "questions", input=None)
    assert asked(await client.threads.get(thread_id)) == questions
    answers = {questions["first?"]: 1, questions["beside?"]: 3}
    await client.runs.wait(thread_id, "questions", command={"resume": answers})
    values = await client.runs.wait(thread_id, "questions", command={"resume": 2})
    assert values["answers"] == [1, 2, 3]


async def test_a_plain_answer_that_is_rolled_back_is_asked_for_again(client, tmp_path):
    """Red when the answer that belongs to no task yet stays: a run without input would go on with it."""
    hold = tmp_path / "hold"
    thread_id = (await client.threads.create())["thread_id"]
    await client.runs.wait(thread_id, "questions", input={"hold": str(hold)})
    before = await shown(client, thread_id)
    run = await client.runs.create(thread_id, "questions", command={"resume": "taken back"})
    await eventually(lambda: Path(f"{hold}.held").exists(), what="the answer taken")
    await client.runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    assert await shown(client, thread_id) == before
    hold.touch()
    await client.runs.wait(thread_id, "questions", input=None)
    assert await shown(client, thread_id) == before


async def test_a_deleted_run_gives_back_the_question_that_it_had_answered(client):
    """Red when what a run replaces at the checkpoint before is not kept: the next question would stand in its place."""
    thread_id = (await client.threads.create())["thread_id"]
    await client.runs.wait(thread_id, "questions", input={})
    first = await shown(client, thread_id)
    await client.runs.wait(thread_id, "questions", command={"resume": "one"})
    second = await shown(client, thread_id)
    assert (set(asked(first[0])), set(asked(second[0]))) == ({"first?"}, {"second?"})
    newest, _ = await client.runs.list(thread_id)
    await client.runs.delete(thread_id, newest["run_id"])
    assert await shown(client, thread_id) == first
    await client.runs.wait(thread_id, "questions", command={"resume": "uno"})
    values = await client.runs.wait(thread_id, "questions", command={"resume": "due"})
    assert values["answers"] == ["uno", "due"]


async def test_a_run_that_ignores_its_rollback_leaves_nothing_but_its_slot(client, query, tmp_path):
    """Red when a run that is ended without its graph leaves its thread as an interrupted run does."""
    thread_id = (await client.threads.create())["thread_id"]
    until = tmp_path / "until"
    run = await client.runs.create(
        thread_id, "stubborn", input={"until": str(until), "padding": "x" * 100_000}
    )

    async def has_state():
        return await query("select 1 from state_snapshots where thread_id = %s", thread_id)

    await eventually(has_state, what="a state")
    await client.runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    until.touch()
    thread, state = await shown(client, thread_id)
    assert thread == {"status": "idle", "interrupts": {}, "values": None, "error": None}
    assert (state["values"], state["next"]) == ({}, [])
    for table in ("checkpoints", "checkpoint_writes", "checkpoint_blobs", "state_snapshots", "state_blobs"):
        assert await query(f"select 1 from {table} where thread_id = %s", thread_id) == [], table


async def test_a_failed_thread_stays_failed_when_the_next_run_is_rolled_back(client, tmp_path):
    """Red when a rollback makes of the thread what its newest state alone says: that there is something left to do."""
    thread_id = (await client.threads.create())["thread_id"]
    with pytest.raises(Exception, match="no more"):
        await client.runs.wait(thread_id, "fails", input={"message": "no more"})
    before = await shown(client, thread_id)
    assert before[0]["status"] == "error"
    run = await client.runs.create(thread_id, "slow", input={"seconds": 120})

    async def begun():
        return (await client.runs.get(thread_id, run["run_id"]))["status"] == "running"

    await eventually(begun, what="the run's begin")
    await client.runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    assert await shown(client, thread_id) == before
