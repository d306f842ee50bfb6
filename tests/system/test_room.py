"""Full sandbox hosts: runs wait without a slot, say so, and go on where there is room."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager, suppress

import aiohttp
import psycopg
import pytest
from langgraph_sdk.errors import ConflictError

from sandfleet.shared.invariants.runs import check_runs
from tests.fixtures_stack import start_stack
from tests.sandbox.host_process import Host
from tests.waiting import eventually

pytestmark = pytest.mark.long
PATIENCE_S = 120.0
HOLD = "echo held > holder; sleep 600"


@pytest.fixture(scope="module")
async def stack(engine, points):
    """Two executors with 4 slots each, and a host that takes one sandbox."""
    started = await start_stack(
        engine,
        "room",
        executors=2,
        restart=True,
        SANDFLEET_SLOTS="4",
        SANDFLEET_LEASE_S="4",
        SANDFLEET_RENEW_EVERY_S="1",
        SANDFLEET_HOST_SANDBOXES="1",
        SANDFLEET_FAULT_POINTS=str(points),
    )
    yield started
    assert await started.stop() == []


async def start(client, *commands, **more):
    thread = await client.threads.create()
    return await client.runs.create(
        thread["thread_id"], "sandboxed", input={"commands": list(commands)}, **more
    )


async def result(client, run):
    async with asyncio.timeout(PATIENCE_S):
        return (await client.runs.join(run["thread_id"], run["run_id"]))["results"]


@asynccontextmanager
async def holder(client, query):
    """A run that has the only place until the block ends."""
    run = await start(client, HOLD)

    async def placed():
        return await query(
            "select 1 from placements where run_id = %s and sandbox_id is not null", run["run_id"]
        )

    await eventually(placed, PATIENCE_S, "the holder has the sandbox")
    yield run
    with suppress(ConflictError):
        await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)


async def waiting(query, run):
    async def at_the_gate():
        return await query(
            "select 1 from runs where run_id = %s and status = 'pending' and gate = 'room'", run["run_id"]
        )

    await eventually(at_the_gate, PATIENCE_S, "the run waits for room")


async def healthy(stack):
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:
        assert (await check_runs(connection)).violations == []


async def test_a_run_waits_for_room_without_a_slot_and_goes_on(client, query, stack):
    """Red when a full host is the model's problem, when the run keeps its executor's slot, or when nobody wakes it."""
    async with holder(client, query):
        run = await start(client, "echo at last")
        await waiting(query, run)
        assert await query("select slots, waiting from tenants where slots > 0") == [(1, 1)]
        await healthy(stack)

        async def slots_are_free():
            return await query("select 1 from executors having sum(busy) = 1")

        await eventually(slots_are_free, PATIENCE_S, "only the holder has a slot")
    assert ["at last" in text for text in await result(client, run)] == [True]
    assert await query("select status from tool_calls where run_id = %s", run["run_id"]) == [("finished",)]
    await healthy(stack)


async def test_its_events_say_that_it_waits(client, query):
    """Red when a client sees nothing of why a run does not go on."""
    async with holder(client, query):
        run = await start(client, "echo hi", stream_mode=["updates"])
        await waiting(query, run)
    events = []
    async with asyncio.timeout(PATIENCE_S):
        async for part in client.runs.join_stream(run["thread_id"], run["run_id"], last_event_id="-1"):
            events.append(part)
    names = [part.event for part in events]
    assert names.count("waiting") == 1
    assert events[names.index("waiting")].data["for"] == "room"
    assert names.index("waiting") < max(n for n, name in enumerate(names) if name == "updates")


async def test_a_run_that_waits_is_cancelled_at_once(client, query, stack):
    async with holder(client, query):
        run = await start(client, "echo never")
        await waiting(query, run)
        await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)
        assert (await client.runs.get(run["thread_id"], run["run_id"]))["status"] == "interrupted"
        await healthy(stack)


async def test_many_runs_share_one_place(client, query, stack):
    """Red when a run is forgotten, fails for lack of room, or gets a sandbox that another one has."""
    runs = await asyncio.gather(*(start(client, f"ls; echo run {n}; touch {n}") for n in range(8)))
    results = await asyncio.gather(*(result(client, run) for run in runs))
    for n, texts in enumerate(results):
        assert len(texts) == 1
        assert texts[0].split() == ["exit", "code:", "0", "stdout:", "run", str(n)], (
            "its workspace is its own"
        )
    calls = await query(
        "select status, count(*) from tool_calls where run_id = any(%s::uuid[]) group by 1",
        [run["run_id"] for run in runs],
    )
    assert calls == [("finished", 8)]
    await healthy(stack)


@pytest.mark.parametrize("point", ["placement.committed", "suspend.uncommitted", "suspend.committed"])
@pytest.mark.parametrize("fault", ["kill", "lose"])
async def test_nothing_is_lost_at_any_step(client, query, stack, points, point, fault):
    """Red when the wish for room, or the slot that was given up, hangs on a process that dies, or on a lost reply."""
    async with holder(client, query):
        (points / point).write_text(fault)
        run = await start(client, "echo done")
        await eventually(lambda: not (points / point).exists(), PATIENCE_S, "the point was reached")
        if fault == "lose":  # else the holder may have lost its executor, too, and then its command
            await waiting(query, run)
    assert ["done" in text for text in await result(client, run)] == [True]
    await healthy(stack)


@asynccontextmanager
async def second_host(stack, engine, tmp_path):
    """A host that executors reach by TCP alone, as if on another machine."""
    host = Host(
        tmp_path / "second",
        stack.info.database_url,
        "docker",
        engine,
        {
            "SANDFLEET_HOST_LISTEN": "127.0.0.1:0",
            "SANDFLEET_HOST_SANDBOXES": "5",
            "SANDFLEET_HOST_ID": "second",
        },
        secret=stack._settings()["SANDFLEET_HOST_SECRET"],
    )
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


async def test_a_run_uses_a_host_on_another_machine_when_its_own_is_full(
    client, query, stack, engine, tmp_path
):
    """Red when executors know their own host only. The second one is reached by TCP."""
    async with holder(client, query), second_host(stack, engine, tmp_path) as host:
        run = await start(client, "echo from elsewhere", "sleep 600")

        async def there():
            return await query(
                "select 1 from placements where host_id = 'second' and run_id = %s and sandbox_id is not null",
                run["run_id"],
            )

        await eventually(there, PATIENCE_S, "the run is on the second host")
        assert (await host.health())["sandboxes"] == 1
        await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)

        async def empty():
            return (await host.health())["sandboxes"] == 0

        await eventually(empty, PATIENCE_S, "the second host has removed it")


async def test_tcp_asks_for_the_same_token(stack, engine, tmp_path):
    """Red when the way from other machines is open."""
    async with second_host(stack, engine, tmp_path) as host, aiohttp.ClientSession() as session:
        url = (await host.health())["remote"]
        assert url.startswith("http://127.0.0.1:")
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        async with session.post(f"{url}/sandbox/exec", data=json.dumps({"command": "id"})) as response:
            assert response.status == 401


async def test_the_loss_of_a_host_is_told_and_the_run_goes_on_elsewhere(
    client, query, stack, engine, tmp_path
):
    """Red when a new, empty sandbox replaces a lost one in silence. The host is killed between two commands."""
    async with holder(client, query), second_host(stack, engine, tmp_path) as host:
        run = await start(client, "touch before; sleep 8", "ls", "ls")

        async def there():
            return await query(
                "select 1 from placements where host_id = 'second' and run_id = %s and sandbox_id is not null",
                run["run_id"],
            )

        await eventually(there, PATIENCE_S, "the run is on the second host")
        host.process.send_signal(signal.SIGKILL)
        await host.process.wait()
        await query("update hosts set heartbeat_at = heartbeat_at - interval '1 h' where host_id = 'second'")
        await waiting(query, run)
    results = await result(client, run)
    assert any("sandbox_lost" in text for text in results), results
