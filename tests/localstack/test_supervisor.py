"""The supervisor restarts what dies, and whatever happens to it, nothing of its own outlives it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from sandfleet.localstack.leftovers import processes_of
from sandfleet.localstack.process import LocalStackError, Process, free_port, tcp_answers
from sandfleet.localstack.supervisor import AlreadyRunning, Supervisor
from tests.waiting import eventually

# Says that it is ready by a file, starts a child in a session of its own, and sleeps.
CHILD = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
PARENT = """
import asyncio, json, pathlib, sys
from tests.localstack.test_supervisor import sleeper
from sandfleet.localstack.supervisor import Supervisor

async def main():
    supervisor = Supervisor(pathlib.Path(sys.argv[1]))
    await supervisor.open()
    await supervisor.start(sleeper(supervisor, "sleeper"))
    print(json.dumps({"instance": supervisor.instance, "watchdog": supervisor.watchdog_pid}), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def sleeper(supervisor: Supervisor, name: str) -> Process:
    """A process with a child that left its session."""
    flag = supervisor.root / f"{name}.ready"

    async def ready() -> bool:
        return flag.exists()

    return Process(
        name=name,
        argv=[sys.executable, "-c", CHILD, str(flag)],
        env=supervisor.base_env(),
        cwd=supervisor.root,
        log=supervisor.logs / f"{name}.log",
        ready=ready,
    )


def alive(instance: str) -> list[psutil.Process]:
    return processes_of(instance)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    one = Supervisor(tmp_path / "stack", restart=True)
    await one.open()
    yield one
    await one.close()
    assert alive(one.instance) == []


async def test_a_dead_process_comes_back(supervisor: Supervisor) -> None:
    """Breaks if `_watch` does not spawn."""
    await supervisor.start(sleeper(supervisor, "one"))
    first = supervisor.processes["one"].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    second = await eventually(
        lambda: (pid := supervisor.processes["one"].pid) != first and pid, what="a new process"
    )
    record = json.loads((supervisor.root / "processes.json").read_text())
    assert [pid for _, pid, _ in record["processes"]] == [second]


async def test_a_process_that_was_stopped_stays_away(supervisor: Supervisor) -> None:
    """Breaks if `stop` leaves the process wanted."""
    await supervisor.start(sleeper(supervisor, "one"))
    await supervisor.start(sleeper(supervisor, "two"))
    await supervisor.stop("one")
    two = supervisor.processes["two"].pid
    assert two is not None
    os.kill(two, signal.SIGKILL)
    await eventually(lambda: supervisor.processes["two"].pid not in (None, two), what="the other one back")
    assert supervisor.processes["one"].pid is None


async def test_a_start_that_fails_tells_the_end_of_its_log(supervisor: Supervisor) -> None:
    """Breaks if `wait_ready` waits out its time although the process is dead."""
    process = sleeper(supervisor, "broken")
    process.argv = [sys.executable, "-c", "raise SystemExit('no such luck')"]
    with pytest.raises(LocalStackError, match="no such luck"):
        await supervisor.start(process)


async def test_stopping_takes_the_grandchildren_along(tmp_path: Path) -> None:
    """A child of a child that left its session is found by its environment. Breaks without `processes_of`."""
    one = Supervisor(tmp_path / "stack")
    await one.open()
    await one.start(sleeper(one, "one"))
    assert len(alive(one.instance)) == 3  # the process, its child and the watchdog
    removed = await one.close()
    assert len(removed) == 1
    assert alive(one.instance) == []


async def test_one_folder_has_one_supervisor(supervisor: Supervisor) -> None:
    """The second one changes nothing of the first. Breaks without the file lock."""
    await supervisor.start(sleeper(supervisor, "one"))
    record = (supervisor.root / "processes.json").read_text()
    second = Supervisor(supervisor.root)
    with pytest.raises(AlreadyRunning, match="already runs"):
        await second.open()
    await second.close()
    assert supervisor.processes["one"].pid is not None
    assert (supervisor.root / "processes.json").read_text() == record


async def _killed_supervisor(root: Path, *, watchdog_too: bool) -> str:
    """Start a supervisor in a process of its own, kill that with SIGKILL, and return its instance."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(root), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    told = json.loads(await asyncio.wait_for(parent.stdout.readline(), 120))
    if watchdog_too:
        os.kill(told["watchdog"], signal.SIGKILL)
    parent.kill()
    await parent.wait()
    return str(told["instance"])


async def test_nothing_outlives_a_supervisor_killed_with_sigkill(tmp_path: Path) -> None:
    """Breaks without the watchdog process."""
    instance = await _killed_supervisor(tmp_path / "stack", watchdog_too=False)
    await eventually(lambda: alive(instance) == [], what="all processes of the killed supervisor gone")


async def test_a_new_supervisor_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Even with the watchdog killed too. Breaks without `clear` in `open`."""
    instance = await _killed_supervisor(tmp_path / "stack", watchdog_too=True)
    await eventually(lambda: len(alive(instance)) == 2, what="the watchdog's end")
    successor = Supervisor(tmp_path / "stack")
    removed = await successor.open()
    assert successor.instance == instance
    assert len(removed) == 2
    assert [p.pid for p in alive(instance)] == [successor.watchdog_pid]
    await successor.close()


# Listens on the port that it is given, or says why it cannot, as servers do.
LISTENER = """
import socket, sys, time
listening = socket.socket()
try:
    listening.bind(("127.0.0.1", int(sys.argv[1])))
except OSError as error:
    sys.exit(f"could not bind: {error.strerror}")
listening.listen()
time.sleep(600)
"""


def listener(supervisor: Supervisor, port: int, name: str = "listener") -> Process:
    """A server that is ready as soon as anybody answers at its port."""
    return Process(
        name=name,
        argv=[sys.executable, "-c", LISTENER, str(port)],
        env=supervisor.base_env(),
        cwd=supervisor.root,
        log=supervisor.logs / f"{name}.log",
        ready=lambda: tcp_answers(port),
    )


async def test_a_server_whose_port_is_taken_gets_another(supervisor: Supervisor) -> None:
    """Somebody else listens there by the time it starts. Breaks if that one's answers are taken for its own, or the start
    is given up."""
    tried: list[int] = []
    with socket.socket() as rival:

        def make(port: int) -> Process:
            if not tried:
                rival.bind(("127.0.0.1", port))
                rival.listen()
            tried.append(port)
            return listener(supervisor, port)

        port = await supervisor.start_on_port(make)
    assert (len(tried), port) == (2, tried[1])
    assert await tcp_answers(port)


async def test_a_wished_port_is_used_if_it_is_free(supervisor: Supervisor) -> None:
    """Breaks if the wish is ignored, or a taken one is insisted on."""
    wish = free_port()
    assert await supervisor.start_on_port(lambda port: listener(supervisor, port, "one"), wish) == wish
    assert await supervisor.start_on_port(lambda port: listener(supervisor, port, "two"), wish) != wish


async def test_a_failed_start_is_told_with_its_own_words_alone(tmp_path: Path) -> None:
    """Red when the end of the log reaches back to an earlier start: what was wrong then is mended by now."""
    supervisor = Supervisor(tmp_path / "stack")
    await supervisor.open()
    try:
        for word in ("first", "second"):
            failing = sleeper(supervisor, "failing")
            failing.argv = [sys.executable, "-c", f"raise SystemExit('the {word} mistake')"]
            with pytest.raises(LocalStackError, match=f"the {word} mistake") as failed:
                await supervisor.start(failing)
        assert "first" not in str(failed.value)
    finally:
        await supervisor.close()


async def test_a_folder_in_a_repository_is_none_of_it(tmp_path: Path) -> None:
    """Red when `git add` of a project takes passwords and databases of its stack along."""
    supervisor = Supervisor(tmp_path / ".sandfleet")
    await supervisor.open()
    try:
        (supervisor.root / "api-key").write_text("secret")
        for words in (["init", "-q"], ["add", "-A"]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True)
        listed = subprocess.run(["git", "ls-files"], cwd=tmp_path, check=True, capture_output=True)
        assert listed.stdout == b""
    finally:
        await supervisor.close()
