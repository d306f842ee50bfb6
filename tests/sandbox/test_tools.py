"""The tools as a graph uses them: live output, clear text for the model, and no result that could break a run."""

import json

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from sandfleet.fleet.sandbox.run_sandbox import current_sandbox
from sandfleet.fleet.sandbox.tools import sandbox_tools
from sandfleet.shared.errors import Superseded, Unavailable

graph = (
    StateGraph(MessagesState).add_node("tools", ToolNode(sandbox_tools)).add_edge(START, "tools").compile()
)


def calls(name, args):
    return {"messages": [AIMessage("", tool_calls=[{"name": name, "args": args, "id": "call_1"}])]}


async def use(name, **args):
    """The tool message that the model would see."""
    return (await graph.ainvoke(calls(name, args)))["messages"][-1]


@pytest.fixture
async def box(sandbox):
    """The run's sandbox, as the executor sets it."""
    token = current_sandbox.set(sandbox)
    yield sandbox
    current_sandbox.reset(token)


@pytest.fixture(autouse=True)
def storable(monkeypatch):
    """Every answer of a tool can be stored as JSON text in PostgreSQL."""
    original = use

    async def checked(name, **args):
        message = await original(name, **args)
        assert "\0" not in message.content
        json.dumps(message.content, ensure_ascii=False).encode("utf-8")
        return message

    monkeypatch.setitem(globals(), "use", checked)


async def test_execute_says_how_it_ended_and_what_it_printed(box):
    message = await use("execute", command="echo out; echo err >&2; exit 3")
    assert (message.status, message.content) == ("success", "exit code: 3\nstdout:\nout\nstderr:\nerr")
    assert (await use("execute", command="true")).content == "exit code: 0\n(no output)"
    assert (await use("execute", command="kill -9 $$")).content == "killed by signal 9\n(no output)"


async def test_execute_says_that_time_ran_out(box):
    for limit_s in (0.5, 5, 50):  # as long as this machine needs for the first word
        message = await use("execute", command="echo early; sleep 300", timeout_s=limit_s)
        if "early" in message.content:
            break
    assert message.content.startswith("timed out: killed after")
    assert "early" in message.content


async def test_execute_says_that_memory_ran_out(docker_sandbox):
    current_sandbox.set(docker_sandbox)
    message = await use("execute", command="python3 -c 'bytearray(2_000_000_000)'")
    assert "out of memory" in message.content


async def test_files_are_written_read_and_listed(box):
    assert (await use("write_file", path="d/a.py", content="é = 1\n")).content == "wrote 7 bytes to d/a.py"
    assert (await use("read_file", path="d/a.py")).content == "é = 1\n"
    assert (await use("list_files")).content == "d/"
    assert (await use("list_files", path="d")).content == "a.py\t7"
    assert (await use("list_files", path="/tmp")).content == "(the directory is empty)"


async def test_a_part_of_a_long_file_is_read_by_lines(box):
    await use("write_file", path="long", content="".join(f"line {n}\n" for n in range(1, 101)))
    message = await use("read_file", path="long", first_line=50, lines=2)
    assert message.content == "line 50\nline 51\n\n[lines 50 to 51 of 100]"
    await use("write_file", path="empty", content="")
    assert (await use("read_file", path="empty")).content == "(the file is empty)"


async def test_long_output_is_shortened_in_the_middle(box):
    """Red when a model gets a megabyte: the context ends there."""
    message = await use("execute", command="seq 1000000")
    assert len(message.content) < 25_000
    assert message.content.startswith("exit code: 0\nstdout:\n1\n2\n")
    assert message.content.endswith("\n1000000")
    assert "left out" in message.content


@pytest.mark.parametrize(
    "made",
    [
        r"printf 'a\0b\377\355\240\200c'",
        "head -c 100000 /dev/urandom",
        "seq 10000 | gzip",
        "printf '\\xf0\\x9f'",
    ],
)
async def test_odd_bytes_become_text(box, made):
    """Red when bytes that are no text, or NUL, reach the run as they are."""
    await use("execute", command=made)
    await use("execute", command=f"({made}) > odd")
    await use("read_file", path="odd")
    await use("execute", command="touch \"$(printf 'x\\377\\n')\"")
    await use("list_files")


async def test_odd_arguments_become_errors_or_text(box):
    await use("write_file", path="odd", content="a\0b\ud800c")
    assert await box.read_file("odd") == b"a\0b?c"
    for name, args in (
        ("execute", {"command": "echo \0"}),
        ("execute", {"command": "echo \ud800"}),
        ("execute", {"command": "true", "timeout_s": -1}),
        ("read_file", {"path": "a\0"}),
        ("read_file", {"path": ""}),
        ("list_files", {"path": "\ud800"}),
        ("read_file", {"path": "/etc/passwd"}),
        ("execute", {"command": "x" * 500_000}),
    ):
        assert (await use(name, **args)).status == "error"


async def test_a_failure_is_an_answer_to_the_model(box):
    """Red when SandboxError leaves the tool: it would end the run."""
    message = await use("read_file", path="missing")
    assert message.status == "error"
    assert message.content.startswith("not_found: ")


async def test_output_is_streamed_while_the_command_runs(box):
    """Red when deltas come at the end, or a character that was cut in two is broken."""
    deltas = []
    command = "printf '\\303'; sleep 0.3; printf '\\251'; until [ -e go ]; do sleep 0.02; done; echo err >&2"
    # LangGraph hands "tools" events on at once only beside "messages" or "custom".
    modes = ["tools", "custom"]
    async for _, event in graph.astream(
        calls("execute", {"command": command, "timeout_s": 20}), stream_mode=modes
    ):
        if event["event"] == "tool-output-delta":
            deltas.append(event["delta"])
            await box.write_file("go", b"")
    assert deltas == [{"stream": "stdout", "text": "é"}, {"stream": "stderr", "text": "err\n"}]


async def test_without_an_executor_the_tool_says_so():
    """Red when a missing sandbox is a LookupError."""
    message = await use("execute", command="true")
    assert (message.status, "executor" in message.content) == ("error", True)


async def test_the_loss_of_the_run_is_no_answer_to_the_model(host, client):
    """Red when a superseded executor's graph goes on with an error text as if nothing had happened."""
    old = await host.sandbox(client, attempt=1)
    new = await host.sandbox(client, key=old.fence.key, attempt=2)
    await new.exec("true")
    current_sandbox.set(old)
    with pytest.raises(Superseded):
        await use("execute", command="true")
    await new.close()


async def test_a_lease_in_doubt_starts_no_command(host, client, sandbox):
    """Red when the refusal to sign is swallowed."""

    async def refuse():
        raise Unavailable("not now")

    sandbox._sign_token = refuse
    current_sandbox.set(sandbox)
    with pytest.raises(Unavailable):
        await use("execute", command="true")
    assert (await host.health())["sandboxes"] == 0
