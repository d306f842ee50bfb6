"""Agents that use their sandbox: a real container each."""

import asyncio
from contextlib import suppress

import psycopg
import pytest
from langgraph_sdk.errors import UnprocessableEntityError

from sandfleet.fleet.host import labels
from sandfleet.fleet.host.engine import Engine
from tests.waiting import eventually


async def outputs(client, *commands):
    values = await client.runs.wait(None, "sandboxed", input={"commands": list(commands)})
    return values["results"]


async def test_an_agent_writes_a_program_and_runs_it(client):
    """Red when files and commands of one run do not share a workspace."""
    calls = [
        {"name": "write_file", "args": {"path": "/workspace/add.py", "content": "print(19 + 23)"}},
        {"name": "execute", "args": {"command": "python3 add.py"}},
        {"name": "read_file", "args": {"path": "/workspace/add.py"}},
        {"name": "list_files", "args": {"path": "/workspace"}},
    ]
    values = await client.runs.wait(None, "sandboxed", input={"calls": calls})
    _, ran, read, listed = values["results"]
    assert "42" in ran
    assert "print(19 + 23)" in read
    assert "add.py" in listed


async def test_tool_events_are_complete(client):
    """Red when a tool's start or end is missing from the stream."""
    events = [
        e.data
        async for e in client.runs.stream(
            None, "sandboxed", input={"commands": ["echo hi", "false"]}, stream_mode="tools"
        )
        if e.event == "tools"
    ]
    kinds = [e["event"] for e in events if e["event"] in ("tool-started", "tool-finished", "tool-error")]
    assert kinds == ["tool-started", "tool-finished"] * 2


async def first_output(stream):
    """The first piece of output of a run's tools, as text."""
    async for event in stream:
        if event.event == "tools" and event.data["event"] == "tool-output-delta":
            return str(event.data)
    raise AssertionError("the stream ended without any output")


async def test_output_is_streamed_while_the_command_runs(client):
    """Red when output is only given when the command has ended: this one ends after it was seen."""
    created = []
    stream = client.runs.stream(
        None, "sandboxed", input={"commands": ["echo one; sleep 600; echo two"]}, stream_mode="tools",
        on_run_created=created.append,
    )  # fmt: skip
    async with asyncio.timeout(120):
        assert "one" in await first_output(stream)
    await client.runs.cancel(created[0]["thread_id"], created[0]["run_id"], wait=True)


async def test_runs_do_not_see_each_others_files(client):
    """Red when two runs share a sandbox: the first holds its own while the second looks."""
    created = []
    stream = client.runs.stream(
        None, "sandboxed", input={"commands": ["echo secret > mine; ls; sleep 600"]}, stream_mode="tools",
        on_run_created=created.append,
    )  # fmt: skip
    async with asyncio.timeout(120):
        assert "mine" in await first_output(stream)
    assert "mine" not in (await outputs(client, "ls -A /workspace /tmp"))[0]
    await client.runs.cancel(created[0]["thread_id"], created[0]["run_id"], wait=True)


async def test_a_host_says_whose_sandboxes_it_has(client, stack):
    """`sandfleet invariants` holds it against the runs. Red when beats do not carry it, or not for long enough."""
    created = []
    stream = client.runs.stream(
        None, "sandboxed", input={"commands": ["echo up; sleep 600"]}, stream_mode="tools",
        on_run_created=created.append,
    )  # fmt: skip
    async with asyncio.timeout(120):
        await first_output(stream)
    run_id = created[0]["run_id"]
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:

        async def told():
            cursor = await connection.execute("select held from hosts")
            return [of for (held,) in await cursor.fetchall() for *_, of in held]

        async def has():
            return run_id in await told()

        async def has_not():
            return run_id not in await told()

        await eventually(has, 60, "the host's word")
        await client.runs.cancel(created[0]["thread_id"], run_id, wait=True)
        await eventually(has_not, 60, "its removal")


async def test_odd_output_never_breaks_a_run(client):
    """Red when bytes that are no text, or NUL, go from a tool into the state as they are."""
    (result,) = await outputs(client, r"printf 'a\0b\377\355\240\200c'")
    assert "a" in result
    assert "c" in result


async def test_a_run_goes_on_after_an_interrupt_with_the_files_of_its_sandbox(client):
    """Red when the sandbox of an interrupted run goes without a snapshot: a week may pass before somebody answers."""
    thread = await client.threads.create()
    calls = {"commands": ["echo kept > note", "cat note; ls -A | wc -l"]}
    await client.runs.wait(
        thread["thread_id"],
        "sandboxed",
        input=calls,
        interrupt_after=["collect"],
        multitask_strategy="reject",
    )
    assert (await client.threads.get(thread["thread_id"]))["status"] == "interrupted"
    values = await client.runs.wait(thread["thread_id"], "sandboxed", input=None)
    assert "kept\n1" in values["results"][1]


BREAK = """
    create function no_snapshots_of_a_thread() returns trigger language plpgsql as
      $$ begin raise exception 'no space left' using errcode = 'disk_full'; end $$;
    create trigger no_snapshots_of_a_thread before insert on snapshots for each row
      when (new.thread_id = '{}'::uuid) execute function no_snapshots_of_a_thread()
"""
MEND = "drop function no_snapshots_of_a_thread() cascade"


@pytest.mark.parametrize("kept_before", [True, False], ids=["an older snapshot", "nothing"])
async def test_whoever_resumes_hears_that_the_files_of_the_interrupted_run_are_not_there(
    client, stack, kept_before
):
    """At the first use of its sandbox, with what it has instead; whatever kept the host from keeping them, here a full disk of
    PostgreSQL. Red when the executor only logs that, or the host does not look who left nothing."""
    thread = (await client.threads.create())["thread_id"]
    calls = {"commands": ["echo one >> note", "echo two >> note", "true", "ls; cat note"]}
    turn = {"interrupt_after": ["collect"]}
    if kept_before:
        await client.runs.wait(thread, "sandboxed", input=calls, **turn)
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:
        await connection.execute(BREAK.format(thread))
        try:
            await client.runs.wait(thread, "sandboxed", input=None if kept_before else calls, **turn)
        finally:
            await connection.execute(MEND)
    values = await client.runs.wait(thread, "sandboxed", input=None)
    told, found = values["results"][2 if kept_before else 1], values["results"][-1]
    assert "workspace of the interrupted run could not be kept" in told
    assert ("files are again as in the snapshot" if kept_before else "finds an empty sandbox") in told
    assert ("note\none" in found) is kept_before
    assert "two" not in found


async def test_whoever_resumes_hears_that_the_sandbox_had_died_before_the_interrupt(client, stack, tmp_path):
    """The run had not used it any more, so it has heard nothing. Red when only what could not be kept is told: what is kept here
    is the empty workspace of another sandbox."""
    go_on = tmp_path / "go_on"
    thread = (await client.threads.create())["thread_id"]
    run = await client.runs.create(thread, "handed_over", input={"until": str(go_on)})

    async def written():
        return (await client.threads.get_state(thread))["values"].get("written")

    await eventually(written, 120, "the file in the sandbox")
    async with Engine(stack.info.docker_host) as engine:
        found = await engine.containers(f"{labels.INSTANCE}={stack.info.instance}")
        (container,) = [each for each in found if run["run_id"] in str(each["Names"])]
        await engine.remove_container(container["Id"])
    go_on.touch()
    await client.runs.join(thread, run["run_id"])
    assert (await client.threads.get(thread))["status"] == "interrupted"
    with pytest.raises(Exception, match="_Replaced: The sandbox was lost"):
        await client.runs.wait(thread, "handed_over", command={"resume": True})


async def test_a_caller_may_ask_for_a_template_that_the_graph_offers(client):
    """Red when sandfleet.toml does not reach the executors or the host, or the wish does not reach the sandbox."""
    for wish, mebibytes in ((None, "512"), ("small", "128")):
        config = {"configurable": {} if wish is None else {"sandbox_template": wish}}
        script = "free -m | awk '/Mem/ {print \"total\", $2}'"
        values = await client.runs.wait(None, "sandboxed", input={"commands": [script]}, config=config)
        assert f"total {mebibytes}" in values["results"][0]


async def test_a_template_that_is_not_offered_is_refused(client):
    """Red when a wish is taken as it comes, or is ignored: a caller could open networks, or think that one is open."""
    config = {"configurable": {"sandbox_template": "closed"}}
    with pytest.raises(UnprocessableEntityError, match=r"config\.configurable\.sandbox_template"):
        await client.runs.create(None, "sandboxed", input={"commands": ["true"]}, config=config)


async def test_a_template_that_is_not_offered_any_more_ends_the_run_before_its_graph_starts(client, stack):
    """Red when an executor takes what the API let through: a deploy may have taken the template away meanwhile."""
    thread = await client.threads.create()
    config = {"configurable": {"sandbox_template": "closed"}}

    async def offer(templates):
        async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
            cursor = await connection.execute(
                """with old as (select sandbox_templates from graphs where graph_id = 'sandboxed')
                   update graphs set sandbox_templates = %s from old where graph_id = 'sandboxed'
                   returning old.sandbox_templates""",
                (templates,),
            )
            return (await cursor.fetchone())[0]

    async def accepted():
        with suppress(UnprocessableEntityError):
            return await client.runs.create(
                thread["thread_id"], "sandboxed", input={"commands": ["true"]}, config=config
            )

    before = await offer(None)
    try:
        run = await eventually(accepted, 30, "the API knows nothing of the graph's templates")
    finally:
        await offer(before)
    await client.runs.join(thread["thread_id"], run["run_id"])
    assert (await client.runs.get(thread["thread_id"], run["run_id"]))["status"] == "error"
    state = await client.threads.get_state(thread["thread_id"])
    assert "results" not in (state["values"] or {})
