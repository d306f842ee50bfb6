"""An executor dies or is stopped in the middle of a run: another goes on from the checkpoint."""

import signal

import pytest

from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

STEPS, HELD_AT = 20, 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_run_outlives_its_executor(client, query, stack, tmp_path, number):
    """Red when a successor gives the graph its input again, or nobody takes the run: the digest depends on each step once.

    SIGKILL: the lease runs out. SIGTERM: the run is handed over. It stays at its tenth step until then.
    """
    go_on = tmp_path / "go_on"
    given = {"steps": STEPS, "wait_at": HELD_AT, "until": str(go_on)}
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "counter", input=given)

    async def held():
        state = await client.threads.get_state(thread["thread_id"])
        return len(state["values"].get("done", [])) == HELD_AT - 1

    async def taken_over():
        return await query(
            "select 1 from runs where run_id = %s and attempt > 1 and status = 'running'", run["run_id"]
        )

    await eventually(held, what="the step before")
    for name in [name for name in stack.info.processes if name.startswith("executor")]:
        await stack.kill(name, number)
        await stack.restart(name)
    await eventually(taken_over, 120, "a living executor")
    go_on.touch()
    values = await client.runs.join(thread["thread_id"], run["run_id"])
    assert values["digest"] == expected_digest(STEPS)
    assert (await client.runs.get(thread["thread_id"], run["run_id"]))["status"] == "success"
    ((attempt, deaths),) = await query("select attempt, deaths from runs where run_id = %s", run["run_id"])
    assert attempt > 1
    assert deaths <= (2 if number == signal.SIGKILL else 0)
    states = await client.threads.get_history(thread["thread_id"], limit=100)
    assert [state["metadata"]["source"] for state in states].count("input") == 1
    events = [e async for e in client.runs.join_stream(thread["thread_id"], run["run_id"], last_event_id="0")]
    assert [e.event for e in events].count("metadata") == attempt
    assert events[-1].event == "end"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_answer_answers_no_other_question_after_a_takeover(client, query, stack, tmp_path, number):
    """Red when a successor is given the answer that its predecessor's graph has taken: what was approved first would
    approve what comes second, and nobody would be asked."""
    hold = tmp_path / "hold"
    thread = await client.threads.create()
    await client.runs.wait(thread["thread_id"], "nested_questions", input={"hold": str(hold)})
    run = await client.runs.create(thread["thread_id"], "nested_questions", command={"resume": "yes"})

    async def taken_over():
        return await query(
            "select 1 from runs where run_id = %s and attempt > 1 and status = 'running'", run["run_id"]
        )

    await eventually((tmp_path / "hold.held").exists, what="the first answer taken")
    for name in [name for name in stack.info.processes if name.startswith("executor")]:
        await stack.kill(name, number)
        await stack.restart(name)
    await eventually(taken_over, 120, "a living executor")
    hold.touch()
    await client.runs.join(thread["thread_id"], run["run_id"])
    interrupted = await client.threads.get(thread["thread_id"])
    assert interrupted["status"] == "interrupted"
    assert [each["value"] for task in interrupted["interrupts"].values() for each in task] == ["second?"]
    values = await client.runs.wait(thread["thread_id"], "nested_questions", command={"resume": "no"})
    assert values["answers"] == ["yes", "no"]


@pytest.mark.long
@pytest.mark.parametrize("lost", [False, True], ids=["sandbox alive", "sandbox lost"])
async def test_an_interrupt_keeps_the_files_of_a_sandbox_that_only_an_earlier_attempt_used(
    client, query, stack, tmp_path, lost
):
    """Red when a snapshot is only taken by the attempt that has used the sandbox, or when what a host that stops has kept
    is forgotten at the interrupt: the resuming run would find nothing."""
    go_on = tmp_path / "go_on"
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "handed_over", input={"until": str(go_on)})

    async def written():
        return (await client.threads.get_state(thread["thread_id"]))["values"].get("written")

    async def taken_over():
        return await query(
            "select 1 from runs where run_id = %s and attempt > 1 and status = 'running'", run["run_id"]
        )

    await eventually(written, 120, "the file in the sandbox")
    for name in [name for name in stack.info.processes if name.startswith("executor")]:
        await stack.kill(name, signal.SIGTERM)
        await stack.restart(name)
    await eventually(taken_over, 120, "a living executor")
    if lost:  # the host keeps the workspace when it stops
        await stack.kill("host", signal.SIGTERM)
        await stack.restart("host")
    go_on.touch()
    await client.runs.join(thread["thread_id"], run["run_id"])
    assert (await client.threads.get(thread["thread_id"]))["status"] == "interrupted"
    values = await client.runs.wait(thread["thread_id"], "handed_over", command={"resume": True})
    assert values["found"] == "kept\n"
