"""An executor dies or is stopped in the middle of a run: another goes on from the checkpoint."""

import signal

import pytest

from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

STEPS = 500  # half a minute: longer than two drains and restarts, so that the run cannot end within a grace period


async def owner_of(query, stack, run_id):
    """Name of the executor process that holds the run."""
    rows = await query("select lease_owner from runs where run_id = %s and status = 'running'", run_id)
    return rows[0][0] if rows else None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_run_outlives_its_executor(client, query, stack, number):
    """Red when a successor starts the run anew, or nobody takes it: the digest depends on each step once.

    SIGKILL: the lease runs out. SIGTERM: the run is handed over.
    """
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "counter", input={"steps": STEPS, "delay_ms": 60})

    async def begun():
        state = await client.threads.get_state(thread["thread_id"])
        return len(state["values"].get("done", [])) >= 5

    await eventually(begun, 30, "five steps")
    for name in [name for name in stack.info.processes if name.startswith("executor")]:
        before = await query("select attempt from runs where run_id = %s", run["run_id"])
        await stack.kill(name, number)
        await stack.restart(name)

        async def taken(before=before):
            return await query("select attempt from runs where run_id = %s", run["run_id"]) != before or (
                await query(
                    "select 1 from runs where run_id = %s and lease_expires_at > clock_timestamp() + interval '1 s'",
                    run["run_id"],
                )
            )

        await eventually(taken, 40, "a living executor")
    values = await client.runs.join(thread["thread_id"], run["run_id"])
    assert values["digest"] == expected_digest(STEPS)
    assert (await client.runs.get(thread["thread_id"], run["run_id"]))["status"] == "success"
    ((attempt, deaths),) = await query("select attempt, deaths from runs where run_id = %s", run["run_id"])
    assert attempt > 1
    assert deaths <= 1
    events = [e async for e in client.runs.join_stream(thread["thread_id"], run["run_id"], last_event_id="0")]
    assert [e.event for e in events].count("metadata") == attempt
    assert events[-1].event == "end"
