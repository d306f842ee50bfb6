"""A run that may have killed its executors gets a process for itself, which no other run shares."""

import signal

import psutil
import pytest

from sandfleet.fleet.executor.quarantine import FLAG
from sandfleet.shared.settings import settings
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

STEPS, HELD_AT = 4, 2


def quarantines(stack):
    """The processes for suspects, by their executor ids."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        info = process.info
        if FLAG in (info["cmdline"] or ()) and stack.supervisor.instance in (info["environ"] or {}).values():
            found[info["cmdline"][-1]] = process
    return found


@pytest.fixture
async def suspect(client, query, tmp_path):
    """A run that one more death ends, and that stays at its second step until the file is there."""
    thread = await client.threads.create()
    go_on = tmp_path / "go_on"
    given = {"steps": STEPS, "wait_at": HELD_AT, "until": str(go_on)}
    run = await client.runs.create(thread["thread_id"], "counter", input=given, after_seconds=3600)
    limit = settings().poison_limit
    await query("update runs set deaths = %s, not_before = now() where run_id = %s", limit - 1, run["run_id"])
    return thread["thread_id"], run["run_id"], go_on


async def holder(query, stack, run_id):
    """The process that holds the run."""
    ((owner,),) = await query("select lease_owner from runs where run_id = %s", run_id)
    return quarantines(stack)[owner]


async def ended_well(client, thread_id, run_id):
    values = await client.runs.join(thread_id, run_id)
    assert values["digest"] == expected_digest(STEPS)


async def test_a_suspect_runs_in_a_process_of_its_own_that_ends_when_none_is_left(
    client, query, stack, suspect
):
    """Red when nobody takes suspects, or each leaves a process behind."""
    thread_id, run_id, go_on = suspect

    async def runs_apart():
        held = await query("select 1 from runs where run_id = %s and status = 'running'", run_id)
        return held and quarantines(stack)

    found = await eventually(runs_apart, 60, "a process for it")
    executors = [pid for name, pid in stack.info.processes.items() if name.startswith("executor")]
    assert {process.ppid() for process in found.values()} <= set(executors)
    go_on.touch()
    await ended_well(client, thread_id, run_id)

    async def gone():
        return not quarantines(stack)

    await eventually(gone, 60, "its end")


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_suspect_is_handed_over_when_the_executor_ends_that_started_its_process(
    client, query, stack, suspect, number
):
    """Red when the process outlives its parent, or the run loses its last life with the parent's."""
    thread_id, run_id, go_on = suspect

    async def at_the_step():
        state = await client.threads.get_state(thread_id)
        return len(state["values"].get("done", [])) == HELD_AT - 1

    await eventually(at_the_step, 60, "the step at which it waits")
    parent = (await holder(query, stack, run_id)).ppid()
    name = next(name for name, pid in stack.info.processes.items() if pid == parent)
    await stack.kill(name, number)
    await stack.restart(name)

    async def taken_over():
        return await query(
            "select 1 from runs where run_id = %s and attempt = 2 and status = 'running'", run_id
        )

    await eventually(taken_over, 60, "a successor")
    go_on.touch()
    await ended_well(client, thread_id, run_id)
    assert await query("select attempt, deaths from runs where run_id = %s", run_id) == [(2, 0)]

    async def gone():
        return not quarantines(stack)

    await eventually(gone, 60, "its end")


async def test_a_suspect_that_kills_its_process_ends(client, query, stack, suspect):
    """Red when nobody looks at how the process ended: the run would kill another, and another."""
    thread_id, run_id, _ = suspect

    async def at_the_step():
        state = await client.threads.get_state(thread_id)
        return len(state["values"].get("done", [])) == HELD_AT - 1

    await eventually(at_the_step, 60, "the step at which it waits")
    await query("update checkpoints set attempt = 0 where run_id = %s", run_id)  # as if it had come without
    (await holder(query, stack, run_id)).kill()

    async def over():
        return await query(
            "select 1 from runs where run_id = %s and error->>'error' = 'ExecutorLost'", run_id
        )

    await eventually(over, 60, "its end")
    assert await query("select deaths >= %s from runs where run_id = %s", settings().poison_limit, run_id)
