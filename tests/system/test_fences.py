"""A frozen executor thaws after its successor has finished: it writes nothing any more, and none of its events is seen."""

import asyncio
import signal
import textwrap
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg
import pytest
from langgraph_sdk import get_client
from redis.asyncio import Redis

from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key
from tests.fixtures_stack import start_stack
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

pytestmark = pytest.mark.long

PATIENCE_S = 90.0
STEPS = 30

# Every table that holds something of a run or of its thread, and the rows of ours in it as one text.
TABLES = """
select table_name, bool_or(column_name = 'run_id'), bool_or(column_name = 'thread_id')
from information_schema.columns where table_schema = 'public' and column_name in ('run_id', 'thread_id') group by 1 order by 1"""
ROWS = "select coalesce(string_agg(t::text, E'\\n' order by t::text), '') from {} t where {}"


@pytest.fixture(scope="module")
async def stack(engine, points):
    """Two executors with a short lease. No grace: what is running at a SIGTERM is handed over."""
    started = await start_stack(
        engine,
        "fences",
        executors=2,
        SANDFLEET_LEASE_S="3",
        SANDFLEET_RENEW_EVERY_S="1",
        SANDFLEET_DRAIN_GRACE_S="0",
        SANDFLEET_FAULT_POINTS=str(points),
    )
    yield started
    assert await started.stop() == []


async def everything(stack, query, thread_id, run_id):
    """All rows of a run and its thread, by table, and what Redis holds of its stream."""
    found = {}
    for table, by_run, by_thread in await query(TABLES):
        where = [f"t.run_id::text = '{run_id}'"] if by_run else []
        where += [f"t.thread_id::text = '{thread_id}'"] if by_thread else []
        ((found[table],),) = await query(ROWS.format(table, " or ".join(where)))
    async with Redis.from_url(stack.info.redis_url) as redis:
        keys = [key async for key in redis.scan_iter(f"*{run_id}*")]
        found["redis"] = {key: await redis.xrange(key) for key in keys if await redis.type(key) == b"stream"}
    return found


async def appended(stack, run_id, last_id):
    """Until the successor has appended its last event: watchers may have had it from the journal before."""
    async with Redis.from_url(stack.info.redis_url) as redis:
        (key,) = [key async for key in redis.scan_iter(f"*{run_id}*") if await redis.type(key) == b"stream"]

        async def there():
            ((entry_id, _),) = await redis.xrevrange(key, count=1)
            return entry_id.decode() == last_id

        await eventually(there, PATIENCE_S, "the last event in Redis")


@asynccontextmanager
async def watched(client, thread_id, run_id):
    """A client that follows the run from its first event, through everything; gives what it has seen."""
    seen = []

    async def follow():
        async for event in client.runs.join_stream(thread_id, run_id, last_event_id="0"):
            seen.append((event.id, event.event, event.data))

    task = asyncio.create_task(follow())
    try:
        yield seen, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def frozen_at(points, point):
    """The process id of the executor that was stopped at a point."""

    def stopped():
        taken = list(points.glob(f"{point}.reached-by-*"))
        return int(taken[0].name.rsplit("-", 1)[1]) if taken else None

    pid = await eventually(stopped, PATIENCE_S, f"an executor at {point}")
    (points / f"{point}.reached-by-{pid}").unlink()
    return pid


def name_of(stack, pid):
    return next(name for name, process in stack.supervisor.processes.items() if process.pid == pid)


async def caught_up(query, executors):
    """Until all executors have said since now that they are idle: then they have settled what they had begun."""
    ((now,),) = await query("select clock_timestamp()")

    async def idle():
        return await query(
            "select 1 from executors where heartbeat_at > %s having count(*) = %s and bool_and(busy = 0)",
            now,
            executors,
        )

    await eventually(idle, PATIENCE_S, "the thawed executor's idleness")


def counted(events):
    """The steps that a counter's updates tell of, by attempt."""
    return [
        (event_id.split("-")[0], step)
        for event_id, event, data in events
        if event == "updates"
        for step in data["count"]["done"]
    ]


@pytest.mark.parametrize(
    "point",
    ["checkpoint.committed", "event.journalled", "finish.before", "renewal.before"],
)
async def test_a_thawed_executor_changes_nothing(stack, client, query, points, point):
    """Red when a write asks neither for the attempt nor for the state, or an append is not refused."""
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"], "counter", input={"steps": STEPS, "delay_ms": 40}, stream_mode="updates"
    )
    ids = thread["thread_id"], run["run_id"]
    async with watched(client, *ids) as (seen, watching):
        await eventually(lambda: len(counted(seen)) >= 5, PATIENCE_S, "five steps")
        (points / point).write_text("stop")
        pid = await frozen_at(points, point)
        await asyncio.wait_for(watching, PATIENCE_S)
        assert (await client.runs.get(*ids))["status"] == "success"
        await appended(stack, run["run_id"], seen[-1][0])
        before = await everything(stack, query, *ids)
        await stack.resume(name_of(stack, pid))
        await caught_up(query, 2)
        assert await everything(stack, query, *ids) == before

    values = (await client.threads.get_state(thread["thread_id"]))["values"]
    assert values["digest"] == expected_digest(STEPS)
    check_stream(seen)
    replay = [(e.id, e.event, e.data) async for e in client.runs.join_stream(*ids, last_event_id="0")]
    assert replay == seen


@pytest.mark.parametrize("point", ["checkpoint.before", "write.before", "event.journalled"])
async def test_an_executor_that_thaws_beside_its_successor_changes_nothing(
    stack, client, query, points, point
):
    """Red when a write asks only whether the run is running, or an append is not refused.

    The successor is in the middle of the run, so nothing but the attempt tells the two apart.
    """
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"], "counter", input={"steps": STEPS, "delay_ms": 100}, stream_mode="updates"
    )
    ids = thread["thread_id"], run["run_id"]

    async def of_first_attempt():
        return [
            await query(ROWS.format("journal", "t.run_id::text = %s and t.attempt = 1"), run["run_id"]),
            await query(ROWS.format("checkpoints", "t.run_id::text = %s and t.attempt = 1"), run["run_id"]),
        ]

    async with watched(client, *ids) as (seen, watching):
        await eventually(lambda: len(counted(seen)) >= 3, PATIENCE_S, "three steps")
        (points / point).write_text("stop")
        pid = await frozen_at(points, point)
        await eventually(
            lambda: any(attempt == "2" for attempt, _ in counted(seen)),
            PATIENCE_S,
            "the successor's first step",
        )
        before = await of_first_attempt()
        await stack.resume(name_of(stack, pid))
        await asyncio.wait_for(watching, PATIENCE_S)
        await caught_up(query, 2)
    assert await of_first_attempt() == before
    check_stream(seen)
    values = (await client.threads.get_state(thread["thread_id"]))["values"]
    assert values["digest"] == expected_digest(STEPS)


def check_stream(seen):
    """What a watcher of a counter's two attempts has seen is in order, without a repetition, and whole."""
    numbers = [tuple(map(int, event_id.split("-"))) for event_id, _, _ in seen]
    assert numbers == sorted(set(numbers)), "out of order, or twice"
    assert numbers[-1][0] == 2
    assert [event for _, event, _ in seen].count("end") == 1
    assert seen[-1][1] == "end"
    steps = counted(seen)
    assert {step for _, step in steps} == set(range(1, STEPS + 1)), "a step's event was lost"
    assert len(set(steps)) == len(steps)


@pytest.mark.parametrize("point", ["tool.before_ledger", "tool.started", "tool.effect_done"])
async def test_an_executor_that_thaws_in_a_tool_call_changes_nothing(
    stack, client, query, points, point, tmp_path
):
    """Red when the ledger's writes are not fenced, or a tool starts although its lease is in doubt.

    At ``tool.started`` the lease was certain: nothing stands between that and the effect any more, which may come late.
    It is marked as doubtful then, and comes once at most.
    """
    path = tmp_path / "lines"
    calls = [[{"tool": "append", "line": "a"}], [{"tool": "append", "line": "b"}]]
    thread = await client.threads.create()
    (points / point).write_text("stop")
    run = await client.runs.create(thread["thread_id"], "effects", input={"path": str(path), "calls": calls})
    ids = thread["thread_id"], run["run_id"]
    pid = await frozen_at(points, point)
    await client.runs.join(*ids)
    assert (await client.runs.get(*ids))["status"] == "success"
    before, lines = await everything(stack, query, *ids), path.read_text().split()
    await stack.resume(name_of(stack, pid))
    await caught_up(query, 2)
    assert await everything(stack, query, *ids) == before
    after = path.read_text().split()
    assert len(after) == len(set(after)), "an effect came twice"
    assert after == lines or point == "tool.started", "the superseded executor made a call"


async def test_a_thawed_executors_command_leaves_nothing_in_the_sandbox(
    stack, client, query, points, tmp_path
):
    """It was frozen with the signed command in its hand, and the successor has given the same command in the same sandbox.
    Red when the host takes a command whose token has expired from an attempt that is not the highest it has seen."""
    go_on = tmp_path / "go_on"
    thread = await client.threads.create()
    (points / "command.before").write_text("stop")
    run = await client.runs.create(thread["thread_id"], "handed_over", input={"until": str(go_on)})
    ids = thread["thread_id"], run["run_id"]
    pid = await frozen_at(points, "command.before")

    async def written():
        return (await client.threads.get_state(thread["thread_id"]))["values"].get("written")

    async def successor_alone():
        return await query(
            "select 1 from executors where heartbeat_at > %s having count(*) = 2 and sum(busy) = 1", thawed_at
        )

    await eventually(written, PATIENCE_S, "the successor's command")
    sandbox = "select sandbox_id from placements where run_id = %s"
    before = await query(sandbox, run["run_id"])
    ((thawed_at,),) = await query("select clock_timestamp()")
    await stack.resume(name_of(stack, pid))
    await eventually(successor_alone, PATIENCE_S, "the end of the thawed executor's attempt")
    assert await query(sandbox, run["run_id"]) == before
    go_on.touch()
    await client.runs.join(*ids)
    assert await query("select status, attempt from runs where run_id = %s", run["run_id"]) == [
        ("success", 2)
    ]
    values = await client.runs.wait(thread["thread_id"], "handed_over", command={"resume": True})
    assert values["found"] == "kept\n"


async def test_an_executor_that_thaws_in_its_hand_over_changes_nothing(
    stack, client, query, points, tmp_path
):
    """Red when a hand-over does not name the attempt: the successor is in the middle of the run, which would be given on."""
    thread = await client.threads.create()
    go_on = tmp_path / "go_on"
    given = {"steps": STEPS, "wait_at": STEPS // 2, "until": str(go_on)}
    run = await client.runs.create(thread["thread_id"], "counter", input=given, stream_mode="updates")
    ids = thread["thread_id"], run["run_id"]
    async with watched(client, *ids) as (seen, watching):
        await eventually(lambda: len(counted(seen)) >= 5, PATIENCE_S, "five steps")
        (points / "hand_over.before").write_text("stop")
        for name in ("executor-1", "executor-2"):
            await stack.kill(name, signal.SIGTERM)
        frozen = name_of(stack, await frozen_at(points, "hand_over.before"))
        other = {"executor-1": "executor-2", "executor-2": "executor-1"}[frozen]
        await stack.restart(other)
        await eventually(lambda: seen[-1][0].startswith("2-"), PATIENCE_S, "the successor's first event")
        await stack.resume(frozen)
        process = stack.supervisor.processes[frozen]
        await eventually(lambda: process.pid is None, PATIENCE_S, "the drained executor's end")
        assert process.exit_code == 0
        go_on.touch()
        await asyncio.wait_for(watching, PATIENCE_S)
    await stack.restart(frozen)
    check_stream(seen)
    assert (await client.threads.get_state(thread["thread_id"]))["values"]["digest"] == expected_digest(STEPS)


async def test_a_row_that_somebody_holds_costs_no_other_run_its_lease(stack, client, query):
    """Red when one statement renews all leases and waits for the one row that is locked. One executor has all runs."""
    process = stack.supervisor.processes["executor-2"]
    await stack.kill("executor-2", signal.SIGTERM)
    await eventually(lambda: process.pid is None, PATIENCE_S, "the end of executor-2")
    threads = [await client.threads.create() for _ in range(4)]
    runs = await asyncio.gather(
        *(
            client.runs.create(t["thread_id"], "slow", input={"seconds": 600, "piece_ms": 100})
            for t in threads
        )
    )

    async def all_running():
        rows = await query(
            "select 1 from runs where run_id = any(%s::uuid[]) and status = 'running'",
            [r["run_id"] for r in runs],
        )
        return len(rows) == len(runs)

    await eventually(all_running, PATIENCE_S, "all runs' start")
    await stack.restart("executor-2")
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as holder:
        await holder.execute("select 1 from runs where run_id = %s for update", (runs[1]["run_id"],))

        async def two_leases_later():
            return await query(
                "select 1 from runs where run_id = %s and lease_expires_at < clock_timestamp() - interval '3 s'",
                runs[1]["run_id"],
            )

        await eventually(two_leases_later, PATIENCE_S, "the held lease's end, and one lease more")
    attempts = await query(
        "select attempt from runs where run_id = any(%s::uuid[])",
        [run["run_id"] for run in runs if run is not runs[1]],
    )
    assert attempts == [(1,)] * 3
    for thread, run in zip(threads, runs, strict=True):
        await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)


@pytest.fixture
async def tenants(stack):
    """Clients of thirty tenants."""
    async with AsyncExitStack() as clients:
        async with await psycopg.AsyncConnection.connect(
            stack.info.database_url, autocommit=True
        ) as connection:
            keys = [await create_key(connection, Owner(f"tenant-{n}", "u"), "test") for n in range(30)]
        yield [
            await clients.enter_async_context(get_client(url=stack.info.api_url, api_key=key)) for key in keys
        ]


async def test_an_exhausted_pool_costs_no_lease(stack, client, tenants, query):
    """Red when renewals wait for a connection of the pool that the graphs use. One tenant could not exhaust it: the ends
    of its runs share a connection."""
    thread = await client.threads.create()
    long = await client.runs.create(thread["thread_id"], "slow", input={"seconds": 600, "piece_ms": 100})
    threads = [await tenant.threads.create() for tenant in tenants]
    runs = await asyncio.gather(
        *(
            tenant.runs.create(thread["thread_id"], "slow", input={"seconds": 5})
            for tenant, thread in zip(tenants, threads, strict=True)
        )
    )
    ids = [run["run_id"] for run in (long, *runs)]
    running = "select 1 from runs where run_id = any(%s::uuid[]) and status = 'running' having count(*) = %s"
    await eventually(lambda: query(running, ids, len(ids)), PATIENCE_S, "all runs' start")
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as holder:
        await holder.execute(
            "lock table threads in access exclusive mode"
        )  # every run that ends waits for it
        ((now,),) = await query("select clock_timestamp()")
        later = "select 1 where clock_timestamp() > %s::timestamptz + interval '10 s'"
        await eventually(lambda: query(later, now), PATIENCE_S, "three leases' time")
        waiting = "select 1 from pg_stat_activity where application_name = 'sandfleet-executor' and wait_event_type = 'Lock'"
        assert len(await query(waiting)) >= 8, "no pool was exhausted"
        holds = "select 1 from runs where run_id = any(%s::uuid[]) and lease_expires_at > clock_timestamp() having count(*) = %s"
        assert await query(holds, ids, len(ids)), "a lease has lapsed"
    ended = "select 1 from runs where run_id = any(%s::uuid[]) and status = 'success' having count(*) = %s"
    await eventually(lambda: query(ended, ids, len(runs)), PATIENCE_S, "the short runs' end")
    await client.runs.cancel(thread["thread_id"], long["run_id"], wait=True)
    attempts = await query("select max(attempt) from runs where run_id = any(%s::uuid[])", ids)
    assert attempts == [(1,)]


SKEWED = """
import os, time
_offset_s = float(os.environ["TEST_CLOCK_OFFSET_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _offset_s
time.time_ns = lambda: _time_ns() + int(_offset_s * 1e9)
"""


async def test_clocks_that_are_a_minute_off_decide_nothing(stack, client, query, tmp_path):
    """Red when the newest checkpoint is the one with the highest id, or a lease is compared with the host's clock."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(SKEWED))
    first, second = "executor-1", "executor-2"
    plain = {name: stack.supervisor.processes[name].env for name in (first, second)}
    for name, offset in zip(plain, (60, -60), strict=True):
        env = {**plain[name], "PYTHONPATH": str(tmp_path), "TEST_CLOCK_OFFSET_S": str(offset)}
        stack.supervisor.processes[name].env = env
    try:
        await stack.kill(second)
        await stack.restart(first)
        thread = await client.threads.create()
        run = await client.runs.create(thread["thread_id"], "counter", input={"steps": STEPS, "delay_ms": 40})

        async def begun():
            state = await client.threads.get_state(thread["thread_id"])
            return len(state["values"].get("done", [])) >= 5

        await eventually(begun, PATIENCE_S, "five steps")
        await stack.kill(first)
        await stack.restart(second)
        assert (await client.runs.join(thread["thread_id"], run["run_id"]))["digest"] == expected_digest(
            STEPS
        )
        events = [
            (e.id, e.event, e.data)
            async for e in client.runs.stream(
                thread["thread_id"], "counter", input={"steps": STEPS + 3}, stream_mode="updates"
            )
        ]
        assert [step for _, step in counted(events)] == [STEPS + 1, STEPS + 2, STEPS + 3]
        assert await query("select attempt from runs where run_id = %s", run["run_id"]) == [(2,)]
        times = await client.runs.get(thread["thread_id"], run["run_id"])
        assert times["created_at"] <= times["updated_at"]
    finally:
        for name, env in plain.items():
            stack.supervisor.processes[name].env = env
        await asyncio.gather(*(stack.restart(name) for name in plain))
