"""A host that was killed, or told to leave, comes back: sandboxes, files and running commands are as they were."""

import asyncio
import hashlib
import os
import signal

import pytest

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import NoSandbox, SandboxLost, StaleAttempt
from sandfleet.shared.ids import Fence
from tests.sandbox.conftest import containers
from tests.sandbox.inside import sleepers
from tests.waiting import eventually


async def gone(host, number=signal.SIGKILL):
    """End the host without its sandboxes."""
    host.process.send_signal(number)
    await host.process.wait()


@pytest.fixture
async def host(own_host):
    host = own_host("docker")
    await host.start()
    return host


@pytest.fixture
async def client(host):
    made = SandboxClient(host.socket)
    yield made
    await made.aclose()


@pytest.fixture
async def sandbox(host, client):
    made = await host.sandbox(client)
    yield made
    await made.close()


async def running(sandbox, command):
    """Start a command; returns its task once it has said something, and the pieces of its output."""
    said = []
    task = asyncio.create_task(sandbox.exec(command, on_output=lambda _, data: said.append(data)))
    await eventually(lambda: said or task.done(), what="the command has begun")
    assert not task.done()
    return task, said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
async def test_a_running_command_ends_as_if_nothing_had_been(host, sandbox, number):
    """Red when agents end with their connection, when a host does not look for them, or executors do not come back."""
    task, _ = await running(
        sandbox, "echo one; until [ -e go ]; do sleep 0.1; done; echo two; echo three >&2; exit 7"
    )
    await gone(host, number)
    await host.start()
    await sandbox.write_file("go", b"")
    result = await task
    assert (result.stdout, result.stderr, result.exit_code) == (b"one\ntwo\n", b"three\n", 7)


async def test_a_command_that_ends_while_the_host_is_away_is_not_lost(host, sandbox):
    """Red when an agent forgets what ended before anybody could hear of it."""
    task, _ = await running(sandbox, "echo one; sleep 0.5; echo two; touch ended")
    await gone(host)
    await host.start()
    result = await task
    assert (result.stdout, result.exit_code) == (b"one\ntwo\n", 0)
    assert (await sandbox.files.stat("ended"))["kind"] == "file"


async def test_no_byte_of_the_output_is_lost_or_doubled(host, sandbox):
    """Red when offsets are counted where bytes may still be under way. The host is killed three times."""
    command = "for i in $(seq 4000); do echo line $i of the output; [ $((i % 500)) != 0 ] || sleep 0.5; done"
    task, said = await running(sandbox, command)
    for _ in range(3):
        before = len(said)
        await gone(host)
        await host.start()
        await eventually(lambda b=before: len(said) > b or task.done(), what="output goes on")
    result = await task
    expected = "".join(f"line {n} of the output\n" for n in range(1, 4001)).encode()
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(expected).digest()
    assert b"".join(said) == expected


async def test_files_and_background_processes_stay(host, sandbox):
    await sandbox.write_file("work", b"half")
    process = await sandbox.processes.start("echo up; sleep 600")
    await gone(host)
    await host.start()
    assert await sandbox.read_file("work") == b"half"
    assert (await sandbox.processes.wait(process.process, 0)).running
    assert (await sandbox.processes.read(process.process, wait_s=5)).data == b"up\n"
    assert (await host.health())["sandboxes"] == 1


async def test_a_superseded_attempt_is_refused_by_the_next_host_too(host, client, sandbox):
    """Red when the highest attempt is only in the memory of the host that died."""
    await sandbox.exec("true")
    successor = await host.sandbox(client, key=sandbox.fence.key, attempt=2)
    await successor.exec("true")
    await gone(host)
    await host.start()
    with pytest.raises(StaleAttempt):
        await sandbox.exec("true")
    await successor.close()


async def test_a_command_whose_executor_is_gone_too_ends_with_the_next_attempt(host, client, sandbox):
    """Red when what lost its host and its caller runs on beside the successor's work."""
    task, _ = await running(sandbox, "echo begun; sleep 601")
    task.cancel()
    await gone(host)
    await asyncio.gather(task, return_exceptions=True)
    await host.start()
    successor = await host.sandbox(client, key=sandbox.fence.key, attempt=2)

    async def nothing_sleeps():
        return not await sleepers(successor)

    await eventually(nothing_sleeps, what="the old command is killed")
    await successor.close()


async def test_one_that_ended_while_the_host_was_away_is_lost(host, sandbox):
    """Red when a new, empty sandbox takes its place in silence."""
    await sandbox.write_file("work", b"half")
    await gone(host)
    (container,) = await containers(host)
    async with Engine(host.docker_host) as engine:
        await engine.remove_container(container["Id"])
    await host.start()
    with pytest.raises(SandboxLost, match="while its host was away"):
        await sandbox.read_file("work")
    assert (await sandbox.list_files())["entries"] == []


STRANGERS = {
    "with a wrong secret": """hello({"newest": 3, "oldest": 3, "secret": "x" * 32})""",
    "with a secret that is no text": """hello({"newest": 3, "oldest": 3, "secret": chr(0xd800)})""",
    "without a word": """held.append(s)""",
}


@pytest.mark.parametrize("says", STRANGERS.values(), ids=STRANGERS.keys())
async def test_nobody_but_the_agent_is_taken_for_it(host, sandbox, says):
    """Red when the first one who dials is believed (a command could speak for the sandbox), when what he says can raise what
    nobody expects (the host would not start), or when one is heard after the other (who says nothing holds up all)."""
    stranger = (
        "import socket, time, json, struct\n"
        "held = []\n"
        "def hello(said):\n"
        "    body = json.dumps(said).encode()\n"
        "    s.send(struct.pack('!IBI', len(body), 1, 0) + body)\n"
        "while True:\n"
        "    s = socket.socket(socket.AF_UNIX)\n"
        "    try:\n"
        "        s.connect('/run/sandfleet/agent.sock')\n"
        f"        {says}\n"
        "        open('dialled', 'a').write('x')\n"
        "    except OSError: pass\n"
        "    time.sleep(0.005)\n"
        "    del held[:-100]\n"
    )
    await sandbox.write_file("work", b"half")
    await sandbox.processes.start(["python3", "-c", stranger])
    await gone(host)
    await host.start()
    assert await sandbox.read_file("work") == b"half"
    assert (await sandbox.files.stat("dialled"))["size"] > 0, "the stranger has tried"


async def test_a_sandbox_in_which_nobody_answers_holds_up_nobody_else(host, client, sandbox):
    """Red when a host serves only after it has found all agents: one that is frozen would keep it from every run. What
    the frozen sandbox's own run asks for is done once it answers."""
    await sandbox.write_file("work", b"half")
    (container,) = await containers(host)
    async with Engine(host.docker_host) as engine:
        pid = (await engine.call("GET", f"/containers/{container['Id']}/json"))["State"]["Pid"]
    os.kill(pid, signal.SIGSTOP)
    await gone(host)
    await host.start()
    reading = asyncio.create_task(sandbox.read_file("work"))
    with pytest.raises(NoSandbox):
        await client.read(host.token(Fence(await host.new_run(), 1)), "work", 0, 10)
    assert not reading.done()
    assert (await host.health())["sandboxes"] == 1
    os.kill(pid, signal.SIGCONT)
    assert await reading == b"half"


@pytest.mark.long
async def test_without_a_host_the_sandbox_ends(host, sandbox):
    """Red when sandboxes of a host that never comes back stay for ever."""
    await sandbox.exec("true")
    await gone(host)

    async def none_left():
        return not await containers(host)

    await eventually(none_left, 120.0, "the sandbox has ended by itself")
    await host.start()  # removes the folder
