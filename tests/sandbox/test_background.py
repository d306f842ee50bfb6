"""Background processes: they outlive the call that starts them, and stay within reach."""

import asyncio
import signal

import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxLost
from sandfleet.fleet.sandbox_agent import wire
from tests.sandbox.inside import sleepers
from tests.waiting import eventually


async def read_until(sandbox, process, text):
    """All output from the start, once ``text`` is in it."""
    data, offset = b"", 0
    async with asyncio.timeout(60):
        while text not in data:
            piece = await sandbox.processes.read(process, offset, wait_s=10)
            data, offset = data + piece.data, piece.state.next_offset
    return data


async def test_a_server_outlives_the_call_that_starts_it_and_serves_the_next(sandbox):
    started = await sandbox.processes.start(
        "until [ -e ask ]; do sleep 0.02; done; echo answer > answer; sleep 300"
    )
    assert started.running
    assert started.pid > 1
    await sandbox.write_file("ask", b"")
    served = await sandbox.exec("until [ -s answer ]; do sleep 0.02; done; cat answer", timeout_s=60)
    assert served.stdout == b"answer\n"


async def test_the_list_says_what_runs_and_how_the_rest_ended(sandbox):
    first = await sandbox.processes.start("exit 7")
    second = await sandbox.processes.start(["sh", "-c", "kill -SEGV $$"])
    third = await sandbox.processes.start("sleep 300", stdin=True)
    for process in (first, second):
        assert not (await sandbox.processes.wait(process.process)).running
    listed = await sandbox.processes.list()
    assert [(p["process"], p["running"], p["exit_code"], p["signal"]) for p in listed] == [
        (first.process, False, 7, None),
        (second.process, False, None, signal.SIGSEGV),
        (third.process, True, None, None),
    ]
    assert [p["command"] for p in listed] == ["exit 7", "sh -c kill -SEGV $$", "sleep 300"]
    assert [p["stdin"] for p in listed] == [False, False, True]


async def test_output_is_read_from_an_offset_and_waited_for(sandbox):
    """Red when a read answers at once although nothing is there, or begins at the wrong byte."""
    started = await sandbox.processes.start("echo one; until [ -e go ]; do sleep 0.02; done; echo two >&2")
    assert await read_until(sandbox, started.process, b"one\n") == b"one\n"
    waiting = asyncio.create_task(sandbox.processes.read(started.process, 4, wait_s=60))
    await sandbox.write_file("go", b"")
    rest = await waiting
    assert (rest.offset, rest.lost_bytes, rest.data) == (4, 0, b"two\n")
    assert rest.state.next_offset == 8
    ended = await sandbox.processes.wait(started.process)
    assert (ended.running, ended.exit_code) == (False, 0)
    assert (await sandbox.processes.read(started.process, 8, wait_s=60)).data == b""


async def test_only_the_newest_output_is_kept_and_the_loss_is_told(sandbox):
    """Red without a bound: output that nobody reads would fill the sandbox's memory in PID 1."""
    started = await sandbox.processes.start("head -c 3000000 /dev/zero; echo end")
    await sandbox.processes.wait(started.process)

    async def all_there():
        piece = await sandbox.processes.read(started.process, 3_000_000)
        return piece.data == b"end\n"

    await eventually(all_there, what="all output has come")
    piece = await sandbox.processes.read(started.process)
    assert len(piece.data) == wire.RING
    assert piece.offset == piece.lost_bytes == 3_000_004 - wire.RING


async def test_input_reaches_it_and_its_end_too(sandbox):
    """Red when a write is not windowed: 2 MB are more than a pipe and the window hold."""
    started = await sandbox.processes.start("head -c 2000000 | wc -c; cat; echo over", stdin=True)
    await sandbox.processes.write(started.process, b"x" * 2_000_000)
    await sandbox.processes.write(started.process, b"line\n", close=True)
    assert await read_until(sandbox, started.process, b"over\n") == b"2000000\nline\nover\n"
    with pytest.raises(OperationRefused) as refused:
        await sandbox.processes.write(started.process, b"more")
    assert refused.value.code == "no_stdin"


async def test_a_write_that_ends_the_process_has_succeeded(sandbox):
    """Red when the end of the process is taken for that of the write: all of it was read before."""
    for _ in range(20):
        started = await sandbox.processes.start("read line; exit 6", stdin=True)
        await sandbox.processes.write(started.process, b"go\n")
        assert (await sandbox.processes.wait(started.process)).exit_code == 6


async def test_a_write_to_who_does_not_read_is_refused_when_it_ends(sandbox):
    """Red when a write waits for ever for a process that is gone."""
    started = await sandbox.processes.start("until [ -e go ]; do sleep 0.02; done", stdin=True)
    writing = asyncio.create_task(sandbox.processes.write(started.process, bytes(2_000_000)))
    await sandbox.write_file("go", b"")
    with pytest.raises(OperationRefused) as refused:
        await writing
    assert refused.value.code == "no_stdin"


async def test_a_signal_reaches_its_process_group(sandbox):
    started = await sandbox.processes.start(
        "trap 'echo heard; exit 3' USR1; echo ready; while true; do sleep 0.05; done"
    )
    await read_until(sandbox, started.process, b"ready\n")
    await sandbox.processes.signal(started.process, signal.SIGUSR1)
    assert (await sandbox.processes.wait(started.process)).exit_code == 3
    assert not (await sandbox.processes.signal(started.process, signal.SIGUSR1)).running


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300",
        "trap '' TERM INT HUP; (setsid sleep 300 &) ; sleep 301",
        "(env -i setsid sleep 300 &) ; true",
    ],
)
async def test_a_kill_takes_all_that_it_started(sandbox, command):
    """Red when only the first process is killed, or nothing of one that has ended and left children."""
    started = await sandbox.processes.start(command)
    await eventually(lambda: sleepers(sandbox), what="it runs")
    killed = await sandbox.processes.kill(started.process)
    assert not killed.running
    assert await sleepers(sandbox) == []
    assert await sandbox.processes.list() == []


async def test_a_killed_process_is_remembered_if_wanted(sandbox):
    started = await sandbox.processes.start("echo said; sleep 300")
    await read_until(sandbox, started.process, b"said\n")
    assert (await sandbox.processes.kill(started.process, keep=True)).signal == signal.SIGKILL
    assert (await sandbox.processes.read(started.process)).data == b"said\n"


async def test_a_time_limit_of_a_command_leaves_background_processes_alone(sandbox):
    """Red when everything in the sandbox is killed at once."""
    started = await sandbox.processes.start("sleep 400")
    assert (await sandbox.exec("sleep 300 & wait", timeout_s=0.5)).timed_out
    assert (await sandbox.processes.wait(started.process, 0)).running


async def test_the_next_attempt_finds_it_running(host, sandbox, client):
    """Red when a new attempt kills what is not a command of the old one; the old attempt has no say any more."""
    started = await sandbox.processes.start("echo before; until [ -e go ]; do sleep 0.02; done; echo after")
    await read_until(sandbox, started.process, b"before\n")
    successor = await host.sandbox(client, key=sandbox.fence.key, attempt=2)
    assert [p["process"] for p in await successor.processes.list()] == [started.process]
    await successor.write_file("go", b"")
    assert await read_until(successor, started.process, b"after\n") == b"before\nafter\n"
    await successor.close()


async def test_their_number_is_bounded(sandbox):
    """Red without the bound: each costs the agent memory for its output. Ended ones make room."""
    for _ in range(wire.MAX_PROCESSES):
        last = await sandbox.processes.start("sleep 300")
    with pytest.raises(OperationRefused) as refused:
        await sandbox.processes.start("true")
    assert refused.value.code == "busy"
    await sandbox.processes.kill(last.process)
    assert (await sandbox.processes.start("sleep 300")).running


async def test_ended_ones_are_forgotten_the_oldest_first(sandbox):
    """Red when ended processes are kept without a bound."""
    for _ in range(wire.MAX_PROCESSES + 5):
        started = await sandbox.processes.start("true")
        await sandbox.processes.wait(started.process)
    numbers = [p["process"] for p in await sandbox.processes.list()]
    assert numbers == list(range(started.process - wire.MAX_PROCESSES + 1, started.process + 1))


async def test_what_is_not_there_is_named(sandbox):
    for attempt in (
        sandbox.processes.read(99), sandbox.processes.write(99, b""), sandbox.processes.wait(99),
        sandbox.processes.kill(99), sandbox.processes.signal(99, 15), sandbox.processes.resize(99, 1, 1),
    ):  # fmt: skip
        with pytest.raises(OperationRefused) as refused:
            await attempt
        assert refused.value.code == "no_process"
    started = await sandbox.processes.start("sleep 300")
    with pytest.raises(OperationRefused) as refused:
        await sandbox.processes.resize(started.process, 10, 10)
    assert refused.value.code == "no_terminal"
    with pytest.raises(OperationRefused):
        await sandbox.processes.start("true", cwd="/no/where")


async def test_a_background_terminal_is_typed_into(sandbox):
    started = await sandbox.processes.start("bash --norc", terminal=(31, 97))
    await sandbox.processes.write(started.process, b"stty size; echo $((6 * 7))\n")
    assert b"31 97" in await read_until(sandbox, started.process, b"42")
    await sandbox.processes.resize(started.process, 20, 50)
    await sandbox.processes.write(started.process, b"stty size; exit 5\n")
    await read_until(sandbox, started.process, b"20 50")
    assert (await sandbox.processes.wait(started.process)).exit_code == 5


async def test_a_wait_ends_with_the_sandbox(docker_host, docker_client):
    """Red when a waiting read outlives the sandbox it waits in, or its failure makes a new one that nobody removes."""
    box = await docker_host.sandbox(docker_client)
    started = await box.processes.start("sleep 300")
    waiting = asyncio.create_task(box.processes.read(started.process, wait_s=60))
    await box.processes.list()
    await box.close()
    with pytest.raises(SandboxLost):
        await waiting
