"""Tool calls of whole runs: they are in the ledger, none stays open, and people can be asked in the middle of one."""

import json

from tests.waiting import eventually


async def tool_calls(client, run):
    return await client.http.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}/tool_calls")


def calling(path, tool, line):
    return {"path": str(path), "calls": [[{"tool": tool, "line": line}]]}


async def test_a_cancelled_run_leaves_its_call_orphaned(client, tmp_path):
    """Red when a terminal state leaves a call `started`."""
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"], "effects", input=calling(tmp_path / "lines", "wait", "a")
    )

    async def started():
        return [c["status"] for c in await tool_calls(client, run)] == ["started"]

    await eventually(started, 30, "the tool's start")
    await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)
    ((status, finished_at),) = [(c["status"], c["finished_at"]) for c in await tool_calls(client, run)]
    assert (status, finished_at is not None) == ("orphaned", True)


async def test_a_person_is_asked_in_the_middle_of_a_tool(client, tmp_path):
    """Red when an interrupt inside a tool leaves an open or failed call, or the resumed tool counts as an orphan."""
    lines = tmp_path / "lines"
    thread = (await client.threads.create())["thread_id"]
    asked = await client.runs.create(
        thread, "effects", input=calling(lines, "append_if_approved", "a"), multitask_strategy="enqueue"
    )
    await client.runs.join(thread, asked["run_id"])
    assert (await client.threads.get(thread))["status"] == "interrupted"
    assert await tool_calls(client, asked) == []
    assert not lines.exists()
    answered = await client.runs.create(thread, "effects", command={"resume": True})
    values = await client.runs.join(thread, answered["run_id"])
    assert values["results"] == [["success", "appended a"]]
    assert lines.read_text() == "a\n"
    assert [c["status"] for c in await tool_calls(client, answered)] == ["finished"]


async def test_sandbox_tools_are_in_the_ledger(client):
    """Red when a tool of our own goes around it."""
    thread = (await client.threads.create())["thread_id"]
    calls = [
        {"name": "write_file", "args": {"path": "/workspace/a", "content": "hi"}},
        {"name": "execute", "args": {"command": "cat a"}},
        {"name": "read_file", "args": {"path": "/workspace/none"}},
    ]
    run = await client.runs.create(thread, "sandboxed", input={"calls": calls})
    await client.runs.join(thread, run["run_id"])
    assert [(c["name"], c["status"]) for c in await tool_calls(client, run)] == [
        ("write_file", "finished"),
        ("execute", "finished"),
        ("read_file", "failed"),
    ]


async def test_an_agents_tool_knows_whom_it_works_for(client, query):
    """Red when the runtime does not reach a synchronous tool of `create_agent`."""
    script = {"turns": [{"tool_calls": [{"name": "whoami"}]}, {"text": "done"}], "repeat_ids": True}
    thread = (await client.threads.create())["thread_id"]
    given = {"messages": [{"role": "user", "content": f"#script:{json.dumps(script)}"}]}
    run = await client.runs.create(thread, "agent_effects", input=given)
    values = await client.runs.join(thread, run["run_id"])
    ((tenant, user_id),) = await query("select tenant, user_id from runs where run_id = %s", run["run_id"])
    assert values["messages"][2]["content"] == f"{tenant}/{user_id}/{run['run_id']}"
    ((message_id, name),) = [(c["message_id"], c["name"]) for c in await tool_calls(client, run)]
    assert (message_id, name) == (values["messages"][1]["id"], "whoami")
