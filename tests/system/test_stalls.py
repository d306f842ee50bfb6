"""Graphs that hold their event loop or do not stop when they are told to, and executors that are told to end."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager, suppress

import pytest
from langgraph_sdk.errors import InternalServerError

from tests.fixtures_stack import start_stack
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

pytestmark = pytest.mark.long

PATIENCE_S = 90.0
LEASE_S = 3


@pytest.fixture(scope="module")
async def stack(engine):
    """Two executors with a short lease and a short grace period."""
    started = await start_stack(
        engine,
        "stalls",
        executors=2,
        SANDFLEET_LEASE_S=str(LEASE_S),
        SANDFLEET_RENEW_EVERY_S="1",
        SANDFLEET_DRAIN_GRACE_S="1",
    )
    yield started
    assert await started.stop() == []


@asynccontextmanager
async def alone(stack, name):
    """One executor takes all runs meanwhile; the other one is back afterwards."""
    (other,) = {"executor-1", "executor-2"} - {name}
    process = stack.supervisor.processes[other]
    await stack.kill(other, signal.SIGTERM)
    await eventually(lambda: process.pid is None, PATIENCE_S, f"the end of {other}")
    yield
    await stack.restart(other)


@pytest.fixture
async def begin(client, query):
    """Create a run of a graph on a thread of its own, and wait until an executor has it: its (thread id, run id)."""

    async def create(graph, **given):
        thread = await client.threads.create()
        run = await client.runs.create(thread["thread_id"], graph, input=given)
        await eventually(
            lambda: query("select 1 from runs where run_id = %s and status = 'running'", run["run_id"]),
            PATIENCE_S,
            "the claim",
        )
        return thread["thread_id"], run["run_id"]

    return create


class Logged:
    """What an executor logs from now on."""

    def __init__(self, stack, name):
        self._path = stack.supervisor.processes[name].log
        self._from = self._path.stat().st_size

    def lines(self, text):
        with self._path.open() as file:
            file.seek(self._from)
            return [json.loads(line) for line in file if text in line]


async def attempt_of(query, ids):
    ((attempt,),) = await query("select attempt from runs where run_id = %s", ids[1])
    return attempt


async def one_idle(query):
    """Until every slot is free again."""
    ((now,),) = await query("select clock_timestamp()")
    free = "select 1 from executors where heartbeat_at > %s having count(*) = 2 and sum(busy) = 0"
    await eventually(lambda: query(free, now), PATIENCE_S, "free slots")


async def test_a_blocked_loop_costs_no_lease_and_holds_up_no_cancel(stack, client, query, begin, tmp_path):
    """Red when leases or cancels depend on the graphs' loop, when a stalled executor takes runs that others could have, or
    when the log does not name the node, once."""
    over, log = tmp_path / "over", Logged(stack, "executor-1")
    try:
        async with alone(stack, "executor-1"):
            neighbour = await begin("slow", seconds=600)
            cancelled = await begin("slow", seconds=600)
            blocking = await begin("blocking", until=str(over))
            await eventually(lambda: log.lines("holds the event loop"), PATIENCE_S, "the report of the stall")
            thread = await client.threads.create()
            waiting = await client.runs.create(thread["thread_id"], "counter", input={"steps": 3})
            lag = "select 1 from executors where loop_lag_ms > 1000"
            await eventually(lambda: query(lag), PATIENCE_S, "the loop's lag where it can be seen")
            assert await attempt_of(query, (None, waiting["run_id"])) == 0
        values = await client.runs.join(thread["thread_id"], waiting["run_id"])
        assert values["digest"] == expected_digest(3)
        await client.runs.cancel(*cancelled, wait=True)
        assert (await client.runs.get(*cancelled))["status"] == "interrupted"
        ((now,),) = await query("select clock_timestamp()")
        later = f"select 1 where clock_timestamp() > %s::timestamptz + interval '{3 * LEASE_S} s'"
        await eventually(lambda: query(later, now), PATIENCE_S, "three leases' time")
        for ids in (neighbour, blocking):
            assert await query(
                "select attempt, lease_expires_at > clock_timestamp() from runs where run_id = %s", ids[1]
            ) == [(1, True)]
    finally:
        over.touch()
    await client.runs.join(*blocking)
    assert (await client.runs.get(*blocking))["status"] == "success"
    await client.runs.cancel(*neighbour, wait=True)
    for ids in (neighbour, blocking):
        assert await attempt_of(query, ids) == 1
    (report,) = log.lines("holds the event loop")
    assert (report["graph"], report["node"], report["run_id"]) == ("blocking", "block", blocking[1])
    assert "blocking.py" in report["place"]
    await one_idle(query)


async def test_runs_that_a_blocked_loop_keeps_from_beginning_go_elsewhere(
    stack, client, query, begin, tmp_path
):
    """Red when what was claimed just before the loop blocked has to wait for its end."""
    over = tmp_path / "over"
    try:
        async with alone(stack, "executor-1"):
            thread = await client.threads.create()
            blocking = await client.runs.create(thread["thread_id"], "blocking", input={"until": str(over)})
            # Submitted before the stall is noticed, so most of them are claimed by the executor that cannot begin them.
            others = await asyncio.gather(
                *(client.runs.create(None, "counter", input={"steps": 2}) for _ in range(10))
            )
        done = "select count(*) from runs where run_id = any(%s::uuid[]) and status = 'success'"

        async def all_done():
            return await query(done, [run["run_id"] for run in others]) == [(len(others),)]

        await eventually(all_done, PATIENCE_S, "the other runs' end")
        assert (await client.runs.get(thread["thread_id"], blocking["run_id"]))["status"] == "running"
    finally:
        over.touch()
    await one_idle(query)


async def test_an_executor_with_a_blocked_loop_drains(stack, client, query, begin, tmp_path):
    """Red when a hand-over waits for the graphs' loop, or the process for the blocked thread."""
    over, log = tmp_path / "over", Logged(stack, "executor-1")
    process = stack.supervisor.processes["executor-1"]
    try:
        async with alone(stack, "executor-1"):
            neighbour = await begin("counter", steps=20, delay_ms=100)
            blocking = await begin("blocking", until=str(over))
            await eventually(lambda: log.lines("holds the event loop"), PATIENCE_S, "the report of the stall")
        await stack.kill("executor-1", signal.SIGTERM)
        await eventually(lambda: process.pid is None, PATIENCE_S, "the executor's end")
        assert process.exit_code == 0
        for ids in (neighbour, blocking):
            assert await attempt_of(query, ids) == 2 or (await client.runs.get(*ids))["status"] == "pending"
    finally:
        over.touch()
    assert (await client.runs.join(*neighbour))["digest"] == expected_digest(20)
    await client.runs.join(*blocking)
    for ids in (neighbour, blocking):
        assert (await client.runs.get(*ids))["status"] == "success"
        assert await query("select attempt, deaths from runs where run_id = %s", ids[1]) == [(2, 0)]
    await stack.restart("executor-1")


async def test_a_graph_that_swallows_its_cancellation_is_cancelled_again(client, query, begin, tmp_path):
    """Red when a run is told to stop only once: a retry loop would go on for ever, fenced, in its slot."""
    ids = await begin("stubborn", until=str(tmp_path / "never"), times=1)
    await client.runs.cancel(*ids, wait=True)
    assert (await client.runs.get(*ids))["status"] == "interrupted"
    await one_idle(query)


async def test_a_graph_that_never_stops_keeps_its_slot_where_it_can_be_seen(
    stack, client, query, begin, tmp_path
):
    """Red when the run's end waits for its graph, or the slot that the graph keeps is shown as free."""
    over, logs = tmp_path / "over", [Logged(stack, name) for name in ("executor-1", "executor-2")]
    ids = await begin("stubborn", until=str(over))
    await client.runs.cancel(*ids, wait=True)
    assert (await client.runs.get(*ids))["status"] == "interrupted"
    ((now,),) = await query("select clock_timestamp()")
    beaten = "select sum(busy) from executors where heartbeat_at > %s having count(*) = 2"
    assert await eventually(lambda: query(beaten, now), PATIENCE_S, "heartbeats") == [(1,)]
    assert [line["run_id"] for log in logs for line in log.lines("ended without its graph")] == [ids[1]]
    over.touch()
    await one_idle(query)
    assert [line["run_id"] for log in logs for line in log.lines("slot is free")] == [ids[1]]


async def test_a_second_sigterm_ends_the_grace_period(stack, client, query, begin):
    """Red when an operator who is in a hurry has to kill the process, which costs the runs a lease."""
    process = stack.supervisor.processes["executor-1"]
    env = process.env
    process.env = {**env, "SANDFLEET_DRAIN_GRACE_S": "600"}
    try:
        await stack.restart("executor-1")
    finally:
        process.env = env
    async with alone(stack, "executor-1"):
        ids = await begin("slow", seconds=600)
    await stack.kill("executor-1", signal.SIGTERM)
    claims = (
        "select 1 from executors where heartbeat_at > clock_timestamp() - interval '5 s' having count(*) = 2"
    )
    await eventually(lambda: query(claims), PATIENCE_S, "both executors")
    assert await attempt_of(query, ids) == 1
    await stack.kill("executor-1", signal.SIGTERM)
    await eventually(lambda: process.pid is None, PATIENCE_S, "the executor's end")
    assert process.exit_code == 0

    async def taken_over():
        return await attempt_of(query, ids) == 2

    await eventually(taken_over, PATIENCE_S, "the successor")
    await client.runs.cancel(*ids, wait=True)
    await stack.restart("executor-1")


async def test_a_successor_takes_the_sandbox_over(stack, client, query, begin):
    """Red when a hand-over removes the sandbox, or the successor gets another one: its files would be gone."""
    async with alone(stack, "executor-1"):
        ids = await begin("sandboxed", commands=["echo mark > file", "sleep 60", "cat file"])

        async def in_the_second_command():
            calls = "select 1 from tool_calls where run_id = %s and status = %s"
            return await query(calls, ids[1], "finished") and await query(calls, ids[1], "started")

        await eventually(in_the_second_command, PATIENCE_S, "the second command")
    process = stack.supervisor.processes["executor-1"]
    await stack.kill("executor-1", signal.SIGTERM)
    first, second, third = (await client.runs.join(*ids))["results"]
    assert "may or may not have taken effect" in second
    assert "mark" in third, first
    assert await query("select attempt, deaths from runs where run_id = %s", ids[1]) == [(2, 0)]
    await eventually(lambda: process.pid is None, PATIENCE_S, "the executor's end")
    await stack.restart("executor-1")


@asynccontextmanager
async def silent_server():
    """A server that accepts connections and never answers; gives its port."""
    writers = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in writers:
        writer.close()


async def test_traces_that_cannot_be_sent_hold_nothing_up(stack, client, query):
    """Red when an executor waits for the tracer's server at its end, which may be for ever, or a run for its traces."""
    process = stack.supervisor.processes["executor-1"]
    env = process.env
    async with silent_server() as port:
        process.env = {
            **env,
            "LANGSMITH_TRACING": "true",
            "LANGSMITH_API_KEY": "none",
            "LANGSMITH_ENDPOINT": f"http://127.0.0.1:{port}",
        }
        log = Logged(stack, "executor-1")
        try:
            async with alone(stack, "executor-1"):
                await stack.restart("executor-1")
                values = await client.runs.wait(None, "counter", input={"steps": 20})
                assert values["digest"] == expected_digest(20)
        finally:
            process.env = env
        await stack.kill("executor-1", signal.SIGTERM)
        await eventually(lambda: process.pid is None, PATIENCE_S, "the executor's end")
        assert process.exit_code == 0
        assert log.lines("traces were not sent")
        assert not log.lines("holds the event loop")
    await stack.restart("executor-1")


async def test_executors_end_while_postgresql_is_away(stack, client, query, begin):
    """Red when an executor that drains, or that is still starting, waits for PostgreSQL for ever; or when a run is lost."""
    ids = await begin("counter", steps=60, delay_ms=100)
    first, second = (stack.supervisor.processes[name] for name in ("executor-1", "executor-2"))
    await stack.kill("executor-2", signal.SIGTERM)
    await eventually(lambda: second.pid is None, PATIENCE_S, "the end of executor-2")
    await stack.supervisor.stop("postgres")
    try:
        log = Logged(stack, "executor-2")
        second.spawn()
        await eventually(lambda: log.lines("does not answer yet"), PATIENCE_S, "an executor that starts")
        for process in (second, first):
            process.wanted = False
            process.send(signal.SIGTERM)
            await eventually(lambda p=process: p.pid is None, PATIENCE_S, "the executor's end")
            assert process.exit_code == 0
    finally:
        await stack.supervisor.start(stack.supervisor.processes["postgres"])
    await asyncio.gather(stack.restart("executor-1"), stack.restart("executor-2"))
    succeeded = "select 1 from runs where run_id = %s and status = 'success'"
    await eventually(lambda: query(succeeded, ids[1]), PATIENCE_S, "the run's end")

    async def answer():  # connections of the API's pool may be those of the old server, and fail once
        with suppress(InternalServerError):
            return (await client.threads.get_state(ids[0]))["values"]["digest"]

    assert await eventually(answer, PATIENCE_S, "an answer of the API") == expected_digest(60)
