"""The example of a deep agent on a whole stack: its files and commands are the run's sandbox, a real container."""

import asyncio
import json
from pathlib import Path

import pytest

from sandfleet.fleet.host.engine import Engine
from tests.fixtures_stack import start_stack
from tests.waiting import eventually

PROJECT = Path(__file__).parents[2] / "examples" / "deep" / "langgraph.json"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
async def stack(engine):
    """A stack that serves the example; its host has room for two sandboxes."""
    started = await start_stack(engine, "deep", project=PROJECT, SANDFLEET_HOST_SANDBOXES="2")
    yield started
    assert await started.stop() == []


def prompt(*calls, end="done"):
    """A prompt that makes the scripted model call tools, one after the other."""
    turns = [
        {"tool_calls": [{"name": name, "args": args, "id": f"call_{n}"}]}
        for n, (name, args) in enumerate(calls)
    ]
    script = json.dumps({"turns": [*turns, {"text": end}]})
    return {"messages": [{"role": "user", "content": f"#script:{script}"}]}


def execute(command):
    return ("execute", {"command": command})


def answers(values):
    """What the tools have answered, in the order of the calls."""
    return [message["content"] for message in values["messages"] if message["type"] == "tool"]


async def use(client, *calls):
    async with asyncio.timeout(PATIENCE_S):
        return answers(await client.runs.wait(None, "deep", input=prompt(*calls)))


async def start(client, *calls):
    thread = await client.threads.create()
    return await client.runs.create(thread["thread_id"], "deep", input=prompt(*calls))


async def containers(stack, query, run):
    """The containers of a run that has its sandbox; waits until it has one."""

    async def placed():
        return await query(
            "select sandbox_id from placements where run_id = %s and sandbox_id is not null", run["run_id"]
        )

    ((sandbox_id,),) = await eventually(placed, PATIENCE_S, "the run has a sandbox")
    async with Engine(stack.info.docker_host) as engine:
        return [c["Id"] for c in await engine.containers(f"sandfleet.sandbox={sandbox_id}")]


async def test_the_example_solves_a_task_as_the_documentation_says(client):
    """Red when the example does not load, or its scripted model calls tools that a deep agent does not have."""
    task = "Which numbers below 100 are prime? Find out with a program."
    values = await client.runs.wait(None, "deep", input={"messages": [{"role": "user", "content": task}]})
    assert "25 primes below 100: [2, 3, 5" in values["messages"][-1]["content"]


async def test_all_tools_work_on_the_same_files(client, query):
    """Red when files and commands are of two sandboxes, or of none."""
    thread = await client.threads.create()
    calls = [
        ("write_file", {"file_path": "/workspace/src/add.py", "content": "print(19 + 22)\n"}),
        ("edit_file", {"file_path": "/workspace/src/add.py", "old_string": "22", "new_string": "23"}),
        ("read_file", {"file_path": "/workspace/src/add.py"}),
        ("grep", {"pattern": "19 + 23", "output_mode": "content"}),
        ("glob", {"pattern": "*.py"}),
        ("ls", {"path": "/workspace"}),
        execute("python3 src/add.py; ls -A /; false"),
        ("delete", {"file_path": "/workspace/src"}),
        ("read_file", {"file_path": "/workspace/src/add.py"}),
    ]
    values = await client.runs.wait(thread["thread_id"], "deep", input=prompt(*calls))
    wrote, edited, read, found, globbed, listed, ran, deleted, missing = answers(values)
    assert "/workspace/src/add.py" in wrote
    assert "Successfully replaced 1 instance" in edited
    assert "print(19 + 23)" in read
    assert "/workspace/src/add.py" in found
    assert "/workspace/src/add.py" in globbed
    assert "/workspace/src" in listed
    assert ran.startswith("42\n")
    assert "failed with exit code 1" in ran
    assert "/workspace/src" in deleted
    assert "file_not_found" in missing
    rows = await query(
        "select name, status from tool_calls where run_id in (select run_id from runs where thread_id = %s) "
        "order by started_at",
        thread["thread_id"],
    )
    assert rows == [*((name, "finished") for name, _ in calls[:-1]), ("read_file", "failed")]


async def test_a_subagent_works_in_the_same_sandbox(client):
    """Red when a subagent has no sandbox, or one of its own."""
    task = prompt(execute("echo found > note"))["messages"][0]["content"]
    delegated = ("task", {"description": task, "subagent_type": "general-purpose"})
    written, read = await use(client, delegated, execute("cat note"))
    assert written == "done"
    assert read.startswith("found\n")


async def test_output_that_is_too_long_is_a_file_in_the_sandbox(client):
    """Red when a model gets a megabyte, or what it does not get is lost: the root file system takes no files."""
    kept = "/workspace/.deepagents/large_tool_results/call_0"
    shown, end = await use(
        client, execute("seq 150000"), ("read_file", {"file_path": kept, "offset": 99_999, "limit": 1})
    )
    assert len(shown) < 10_000
    assert kept in shown
    assert "100000" in end


async def test_output_is_streamed_while_the_command_runs(client):
    """Red when output comes at a command's end: this one ends only when its run is cancelled, and then is gone."""
    created = []
    stream = client.runs.stream(
        None, "deep", input=prompt(execute("echo one; sleep 600; echo two")), stream_mode="tools",
        on_run_created=created.append,
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream:
            if event.event == "tools" and "one" in str(event.data.get("delta")):
                break
    await client.runs.cancel(created[0]["thread_id"], created[0]["run_id"], wait=True)


async def test_a_cancel_ends_the_command_and_removes_the_sandbox(client, stack, query):
    """Red when the cancel of a deep agent leaves its command running."""
    run = await start(client, execute("echo begun; sleep 600"))
    (container,) = await containers(stack, query, run)
    await client.runs.cancel(run["thread_id"], run["run_id"], wait=True)

    async def gone():
        async with Engine(stack.info.docker_host) as engine:
            return container not in [c["Id"] for c in await engine.containers("sandfleet=1")]

    await eventually(gone, what="the container is gone")
    rows = await query("select status from tool_calls where run_id = %s", run["run_id"])
    assert rows == [("orphaned",)]


async def test_a_lost_sandbox_is_told_to_the_model_and_the_agent_goes_on(client, stack, query):
    """Red when the run ends with its sandbox, or goes on in an empty one without a word."""
    run = await start(
        client, execute("echo begun > note; sleep 600"), ("ls", {"path": "/workspace"}), execute("echo on")
    )
    (container,) = await containers(stack, query, run)

    async def begun():
        return await query("select 1 from tool_calls where run_id = %s", run["run_id"])

    await eventually(begun, PATIENCE_S, "the command is in the ledger")
    async with Engine(stack.info.docker_host) as engine:
        await engine.call("POST", f"/containers/{container}/kill")
    async with asyncio.timeout(PATIENCE_S):
        lost, listed, ran = answers(await client.runs.join(run["thread_id"], run["run_id"]))
    assert lost.startswith("Error: sandbox_lost: ")
    assert "note" not in listed
    assert ran.startswith("on\n")


async def test_an_agent_waits_for_room_before_it_calls_a_tool(client, query):
    """Red when the tools of deep agents do not say that they need the sandbox: their model would see `no_room`."""
    holders = [await start(client, execute("sleep 600")) for _ in range(2)]
    for holder in holders:
        await eventually(
            lambda: query("select 1 from tool_calls where run_id = %s", holder["run_id"]), PATIENCE_S
        )
    waiting = await start(client, execute("echo my turn"))

    async def at_the_gate():
        return await query("select 1 from runs where run_id = %s and gate = 'room'", waiting["run_id"])

    await eventually(at_the_gate, PATIENCE_S, "the run waits for room")
    for holder in holders:
        await client.runs.cancel(holder["thread_id"], holder["run_id"], wait=True)
    async with asyncio.timeout(PATIENCE_S):
        (ran,) = answers(await client.runs.join(waiting["thread_id"], waiting["run_id"]))
    assert ran.startswith("my turn\n")
