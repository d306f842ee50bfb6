"""Expected failures of the command line are one clear line, never a traceback."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sandfleet.localstack.leftovers import processes_of
from sandfleet.localstack.supervisor import Supervisor
from tests.waiting import eventually


async def sandfleet(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    command = [sys.executable, "-c", "from sandfleet.localstack.entry import main; main()", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@pytest.mark.parametrize("command", ["runs", "run x", "watch 7", "cancel 7", "db migrate"])
async def test_without_a_stack_a_command_says_what_to_do(command: str, tmp_path: Path) -> None:
    """Breaks if `terminal.run` does not know the error."""
    code, _, error = await sandfleet(*command.split(), cwd=tmp_path)
    assert code == 1
    assert "sandfleet dev" in error
    assert "Traceback" not in error


async def test_a_project_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Breaks if the stack starts before it has looked."""
    code, _, error = await sandfleet("dev", "--project", "nowhere.json", cwd=tmp_path)
    assert code == 1
    assert "nowhere.json" in error
    assert "Traceback" not in error


async def test_a_mistake_in_the_project_is_said_before_a_server_starts(tmp_path: Path) -> None:
    """Breaks if an executor is the first to read the project: minutes later, with a database and an engine up."""
    (tmp_path / "langgraph.json").write_text('{"graphs": {"g": "./nowhere.py:g"}}')
    code, out, error = await sandfleet("dev", cwd=tmp_path)
    assert (code, out) == (1, "")
    assert "nowhere.py, which langgraph.json names" in error
    assert not (tmp_path / ".sandfleet").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give one of"),
        (["x", "--input", "{}"], "Give one of"),
        (["--input", "{"], "--input is not JSON"),
        (["--resume", "yes"], "--thread"),
    ],
)
async def test_what_a_run_is_to_do_is_asked_before_the_api(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    """Breaks if a run begins with an input that nobody meant."""
    code, _, error = await sandfleet("run", *arguments, cwd=tmp_path)
    assert code == 1
    assert said in error
    assert "Traceback" not in error


AT_AN_IMPORT = """
import os, sys
class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            os.kill(os.getpid(), int(sent))
at, sent = sys.argv.pop(1), sys.argv.pop(1)
sys.meta_path.insert(0, Sender())
from sandfleet.localstack.entry import main
main()
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["typer", "sandfleet.localstack.terminal", "sandfleet.localstack.stack"])
async def test_a_signal_while_the_program_is_loaded_is_quiet(at: str, sent: int, tmp_path: Path) -> None:
    """Breaks if the signals are taken over only when the command line has been imported."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AT_AN_IMPORT, at, str(int(sent)), "demo", "--root", str(tmp_path / "stack"),
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert (process.returncode, said) == (130, b"")


def names(instance: str) -> set[str]:
    """Names of the processes of a stack; some live for a moment only."""
    found = set()
    for process in processes_of(instance):
        with suppress(psutil.NoSuchProcess):
            found.add(process.name())
    return found


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_the_stack_starts_leaves_nothing(
    sent: signal.Signals, tmp_path: Path, engine: str
) -> None:
    """The command ends with 130 and nothing of it runs on. Breaks if a signal skips `Stack.stop`."""
    root = tmp_path / "stack"
    instance = Supervisor(root).instance
    command = [sys.executable, "-c", "from sandfleet.localstack.entry import main; main()"]
    env = {**os.environ, "DOCKER_HOST": engine}
    process = await asyncio.create_subprocess_exec(
        *command, "demo", "--root", str(root), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )  # fmt: skip
    await eventually(lambda: "postgres" in names(instance), 180, "PostgreSQL")
    process.send_signal(sent)
    await asyncio.wait_for(process.communicate(), 180)
    assert process.returncode == 130
    assert processes_of(instance) == []
