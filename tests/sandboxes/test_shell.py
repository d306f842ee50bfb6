"""``sandfleet sandbox``, as a user types it."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually

SANDFLEET = (str(Path(sys.executable).parent / "sandfleet"), "sandbox")


def env_of(fleet: Fleet) -> dict[str, str]:
    return {**os.environ, "SANDFLEET_API_URL": fleet.url, "SANDFLEET_API_KEY": fleet.alice, "TERM": "xterm"}


class Terminal:
    """A program in a terminal of its own, and what the user would see."""

    def __init__(self, fd: int, process: asyncio.subprocess.Process) -> None:
        self.fd = fd
        self.process = process
        self.seen = ""
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        data = b""
        with suppress(OSError):  # nobody holds the other end any more
            data = os.read(self.fd, 65536)
        if not data:
            asyncio.get_running_loop().remove_reader(self.fd)
        self.seen += data.decode("utf-8", "replace")

    async def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.fd, text.encode())

    async def sees(self, pattern: str) -> re.Match[str]:
        found: re.Match[str] = await eventually(
            lambda: re.search(pattern, self.seen), what=f"{pattern!r} is shown"
        )
        return found

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@asynccontextmanager
async def shell(fleet: Fleet, *options: str) -> AsyncIterator[Terminal]:
    """`sandfleet sandbox shell` in a terminal of 30 rows and 90 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *SANDFLEET, "shell", *options, stdin=theirs, stdout=theirs, stderr=theirs, env=env_of(fleet), start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    terminal = Terminal(ours, process)
    try:
        yield terminal
        async with asyncio.timeout(60):
            await process.wait()
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def test_a_shell_is_a_terminal_in_a_fresh_sandbox(fleet: Fleet, http: httpx.AsyncClient) -> None:
    """Its size is the user's and follows it, Ctrl-C goes inside and ends no more than the command there, the exit code comes
    out, and the sandbox is gone."""
    async with shell(fleet, "--template", "small") as terminal:
        await terminal.type("stty size; pwd\n")
        await terminal.sees(r"30 90\r\n/workspace")
        (sandbox,) = (await http.get("/sandboxes")).json()
        assert sandbox["template"] == "small"
        terminal.resize(40, 120)

        async def resized() -> bool:
            await terminal.type("stty size\n")
            await terminal.sees(r"\d+ \d+\r\n")
            return "40 120" in terminal.seen

        await eventually(resized, what="the size follows")
        await terminal.type("sleep 600\n")
        await terminal.sees("sleep 600")
        await terminal.type("\x03")
        await terminal.sees(r"\^C")
        await terminal.type("echo $((6*7)); exit 9\n")
        await terminal.sees("42")
    assert terminal.process.returncode == 9
    assert (await http.get("/sandboxes")).json() == []


async def test_a_shell_that_is_ended_from_outside_leaves_no_sandbox(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """As when its window is closed."""
    async with shell(fleet) as terminal:
        await terminal.type("echo $((6*7))\n")
        await terminal.sees("42")
        terminal.process.send_signal(signal.SIGHUP)
    assert (await http.get("/sandboxes")).json() == []


async def sandfleet(fleet: Fleet, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """A command's exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *SANDFLEET, *words, env=env_of(fleet), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_a_shell_reads_the_commands_that_come_through_a_pipe(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Both outputs come apart, the exit code is that of the script, and the sandbox is gone. Red when a pipe is refused."""
    script = b"cd /tmp; pwd\necho oops >&2\n(exit 7)\n"
    assert await sandfleet(fleet, "shell", stdin=script) == (7, "/tmp\n", "oops\n")
    assert (await http.get("/sandboxes")).json() == []


async def test_a_pipe_to_a_template_that_is_not_there_hears_so(fleet: Fleet) -> None:
    code, output, errors = await sandfleet(fleet, "shell", "--template", "none", stdin=b"ls\n")
    assert (code, output) == (1, "")
    assert errors.startswith("Error: template: there is none of this name")


async def test_create_exec_ls_rm(fleet: Fleet) -> None:
    """A command gets what comes through the pipe, and its exit code is ours."""
    code, made, errors = await sandfleet(fleet, "create", "--ttl", "100")
    assert code == 0, errors
    sandbox_id = made.strip()
    code, listed, _ = await sandfleet(fleet, "ls")
    assert sandbox_id in listed
    assert await sandfleet(fleet, "exec", sandbox_id, "cat; echo oops >&2; exit 5", stdin=b"in\n") == (
        5,
        "in\n",
        "oops\n",
    )
    assert (await sandfleet(fleet, "exec", sandbox_id, "echo", "-n", "$HOME"))[1] == "$HOME"
    assert (await sandfleet(fleet, "rm", sandbox_id))[0] == 0
    code, _, errors = await sandfleet(fleet, "rm", sandbox_id)
    assert (code, "not found" in errors) == (1, True)
