"""The run's sandbox as the backend of deep agents: the protocol of ``deepagents``, in real sandboxes."""

import asyncio
import threading

import pytest
from deepagents.backends.protocol import SandboxBackendProtocol
from deepagents.middleware.filesystem import FilesystemMiddleware

from sandfleet.fleet import deepagents
from sandfleet.fleet.deepagents import SandboxBackend, sandbox_backend
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.run_sandbox import current_sandbox
from sandfleet.fleet.tools import does_need_sandbox, is_idempotent

RESULTS = {
    "ls": ("/workspace",),
    "read": ("/workspace/a",),
    "write": ("/workspace/a", "b"),
    "edit": ("/workspace/a", "b", "c"),
    "delete": ("/workspace/a",),
    "glob": ("*",),
    "grep": ("b",),
}


@pytest.fixture
async def backend(sandbox):
    """The backend in a run's context, as the executor sets it."""
    token = current_sandbox.set(sandbox)
    yield SandboxBackend()
    current_sandbox.reset(token)


async def test_a_file_is_written_edited_read_listed_found_and_deleted(backend):
    """Red when one of the file methods does not reach the sandbox, or names paths in another way than the next wants."""
    path = "/workspace/src/app.py"
    assert (await backend.awrite(path, "one = 1\r\ntwo = 2\r\nfünf = 5\r\n")).path == path
    assert (await backend.aedit(path, "two = 2", "two = 22")).occurrences == 1
    read = await backend.aread(path, offset=1, limit=1)
    assert (read.file_data["content"].rstrip(), read.start_line, read.total_lines) == ("two = 22", 2, 3)
    assert [(e["path"], e["is_dir"]) for e in (await backend.als("/workspace")).entries] == [
        ("/workspace/src", True)
    ]
    assert [m["path"] for m in (await backend.aglob("*.py")).matches] == [path]
    assert (await backend.agrep("fünf")).matches == [{"path": path, "line": 3, "text": "fünf = 5"}]
    assert (await backend.agrep("two", path)).matches == [{"path": path, "line": 2, "text": "two = 22"}]
    assert (await backend.adelete("/workspace/src")).error is None
    assert (await backend.als("/workspace")).entries == []


async def test_a_search_is_limited_to_files_and_matches_and_leaves_git_out(backend):
    for path in ("a.py", "b.txt", ".git/config"):
        await backend.awrite(f"/workspace/{path}", "needle\nneedle\n")
    found = await backend.agrep("needle", "/workspace", "*.py", max_count=1)
    assert ([m["path"] for m in found.matches], found.truncated) == (["/workspace/a.py"], True)
    everywhere = await backend.agrep("needle")
    assert {m["path"] for m in everywhere.matches} == {"/workspace/a.py", "/workspace/b.txt"}
    assert not everywhere.truncated


async def test_a_command_says_how_it_ended_and_what_it_printed_in_order(backend):
    """Red when stdout and stderr are put one behind the other, or an end by a signal looks like success."""
    ran = await backend.aexecute("echo out; sleep 0.2; echo err >&2; sleep 0.2; echo out; exit 3")
    assert (ran.output, ran.exit_code, ran.truncated) == ("out\nerr\nout\n", 3, False)
    assert (await backend.aexecute("kill -9 $$")).exit_code == 137
    late = await backend.aexecute("sleep 300", timeout=1)
    assert late.exit_code == 124
    assert "timed out: killed after" in late.output
    assert (await backend.aexecute("echo no limit", timeout=0)).output == "no limit\n"


async def test_a_command_does_not_wait_for_what_it_has_left_running(backend):
    """Red when output is captured in the sandbox: whoever starts a server waits for its end."""
    ran = await backend.aexecute_with_offload(
        "sleep 300 & echo started", "/workspace/kept", max_inline_bytes=1
    )
    assert (ran.offloaded, ran.response.output, ran.response.exit_code) == (False, "started\n", 0)


async def test_files_of_the_agent_do_not_get_in_the_way_of_its_tools(backend):
    """Red when the tools' scripts run in the workspace, whose modules Python would import instead of its own."""
    for module in ("json", "base64", "os", "fnmatch", "stat"):
        await backend.awrite(f"/workspace/{module}.py", "raise SystemExit('imported')")
    assert (await backend.aread("/workspace/json.py")).file_data["content"].startswith("raise SystemExit")
    assert (await backend.aedit("/workspace/json.py", "imported", "changed")).occurrences == 1
    assert len((await backend.aglob("*.py")).matches) == 5
    assert len((await backend.als("/workspace")).entries) == 5


async def test_files_go_up_and_down_one_by_one(backend):
    """Red when one file that fails spoils the others, or content over one piece is cut."""
    content = bytes(range(256)) * 40_000
    up = await backend.aupload_files([("/workspace/d/big", content), ("/etc/passwd", b"")])
    assert [answer.error for answer in up] == [None, "invalid_path"]
    down = await backend.adownload_files(["/workspace/d/big", "/workspace/none", "/workspace/d"])
    assert [answer.error for answer in down] == [None, "file_not_found", "is_directory"]
    assert down[0].content == content


async def test_a_file_too_large_for_the_executors_memory_is_not_fetched(backend, monkeypatch):
    """Red when a file is gathered to its end: a huge one costs nothing in a sandbox. This one is small enough to be red without
    harm to the machine."""
    monkeypatch.setattr(deepagents, "MOST_DOWNLOAD_BYTES", 8 * 1024 * 1024)
    assert (await backend.aexecute("truncate -s 128M /workspace/huge")).exit_code == 0
    (huge,) = await backend.adownload_files(["/workspace/huge"])
    assert (huge.content, huge.error) == (None, "larger than 8388608 bytes")


async def test_a_lost_sandbox_is_the_error_of_one_call(docker_host, docker_client):
    """Red when a model sees an empty directory or an exception where its files went."""
    sandbox = await docker_host.sandbox(docker_client)
    current_sandbox.set(sandbox)
    backend = sandbox_backend()
    for method, arguments in RESULTS.items():
        await backend.awrite("/workspace/a", "b")
        lost = (await docker_client.acquire(await sandbox._sign_token()))["sandbox_id"]
        async with Engine(docker_host.docker_host) as engine:
            for container in await engine.containers(f"sandfleet.sandbox={lost}"):
                await engine.remove_container(container["Id"])
        answer = await getattr(backend, f"a{method}")(*arguments)
        assert answer.error.startswith("Error: sandbox_lost: ")
        assert (await backend.als("/workspace")).entries == []
    await sandbox.close()


async def test_without_a_run_every_answer_says_that_there_is_no_sandbox():
    backend = SandboxBackend()
    for method, arguments in RESULTS.items():
        for name in (method, f"a{method}"):
            answer = getattr(backend, name)(*arguments)
            assert "There is no sandbox here" in (await answer if name[0] == "a" else answer).error
    assert "There is no sandbox here" in backend.execute("true").output
    assert backend.id == ""


async def test_threads_use_the_sandbox_of_their_run(backend):
    """Red when the methods that are not async do not reach the event loop that the sandbox lives on."""

    def use():
        assert backend.write("/workspace/a", "one\n").error is None
        assert backend.edit("/workspace/a", "one", "two").occurrences == 1
        assert backend.read("/workspace/a").file_data["content"].rstrip() == "two"
        assert backend.grep("two").matches[0]["path"] == "/workspace/a"
        assert [m["path"] for m in backend.glob("*").matches] == ["/workspace/a"]
        assert backend.ls("/workspace").entries[0]["path"] == "/workspace/a"
        assert backend.upload_files([("/workspace/b", b"x")])[0].error is None
        assert backend.download_files(["/workspace/b"])[0].content == b"x"
        assert backend.delete("/workspace/b").error is None
        return backend.execute("cat a").output

    assert await asyncio.to_thread(use) == "two\n"


async def test_the_event_loop_does_not_wait_for_itself(backend, monkeypatch):
    """Red when a node that calls the methods for threads, itself or in a thread that it waits for, hangs for ever."""
    assert "the event loop that it needs waits" in backend.execute("true").output
    monkeypatch.setattr("sandfleet.fleet.sandbox.run_sandbox._LOOP_PATIENCE_S", 0.1)
    answers = []
    token = current_sandbox.get()

    def use():
        current_sandbox.set(token)
        answers.append(backend.ls("/workspace").error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()  # on the event loop
    assert "the event loop that it needs waits" in answers[0]


def test_the_agents_tools_wait_for_room_and_are_repeated_where_that_does_no_harm():
    """Red when deepagents makes its tools in another way: they would see `no_room`, and a crash would orphan a read."""
    tools = {tool.name: tool for tool in FilesystemMiddleware(backend=sandbox_backend()).tools}
    assert all(does_need_sandbox(tool) for tool in tools.values())
    repeated = {name for name, tool in tools.items() if is_idempotent(tool)}
    assert repeated == {"ls", "read_file", "write_file", "glob", "grep"}
    others = FilesystemMiddleware().tools
    assert not any(does_need_sandbox(tool) or is_idempotent(tool) for tool in others)


def test_the_backend_is_one_that_deepagents_knows_to_execute():
    assert isinstance(SandboxBackend(), SandboxBackendProtocol)
