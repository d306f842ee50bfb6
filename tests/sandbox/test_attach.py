"""Commands to speak with while they run: input as it is typed, and terminals."""

import asyncio

import aiohttp
import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused, StaleAttempt
from sandfleet.shared.sandbox_token import SandboxTokenInvalid
from tests.sandbox.inside import sleepers
from tests.waiting import eventually


class Spoken:
    """Reads an attached command's events."""

    def __init__(self, command):
        self._events = command.events()
        self.heard = b""
        self.exit = None

    async def until(self, text):
        async with asyncio.timeout(60):
            while text not in self.heard:
                event = await anext(self._events)
                self.heard += event["data"]
        return self.heard

    async def end(self):
        async with asyncio.timeout(60):
            async for event in self._events:
                if event["event"] == "exit":
                    self.exit = event
                else:
                    self.heard += event["data"]
        return self.exit


async def test_input_is_answered_while_the_command_runs(sandbox):
    """Red when input is held until it is complete."""
    async with await sandbox.attach("while read line; do echo got $line; done; echo over") as command:
        spoken = Spoken(command)
        for word in (b"one", b"two"):
            await command.send(word + b"\n")
            await spoken.until(b"got " + word)
        await command.send_eof()
        assert (await spoken.end())["exit_code"] == 0
    assert spoken.heard == b"got one\ngot two\nover\n"


async def test_much_input_and_output_flow_at_once(sandbox):
    """Red when either direction waits for the other: 5 MB fit no window. The rest of the output is counted."""
    async with await sandbox.attach("tee copy") as command:
        spoken = Spoken(command)
        ending = asyncio.create_task(spoken.end())
        await command.send(b"0123456789" * 500_000)
        await command.send_eof()
        ended = await ending
    assert ended["exit_code"] == 0
    assert (await sandbox.files.stat("copy"))["size"] == 5_000_000
    assert ended["dropped_bytes"] > 0


async def test_an_interactive_shell_works_in_a_terminal(sandbox):
    async with await sandbox.attach(
        ["bash", "--norc", "-i"], terminal=(24, 80), env={"PS1": "ready> "}
    ) as shell:
        spoken = Spoken(shell)
        await spoken.until(b"ready> ")
        await shell.send(b"tty; stty size; echo $TERM\n")
        await spoken.until(b"xterm-256color")
        assert b"/dev/pts/" in spoken.heard
        assert b"24 80" in spoken.heard
        assert b"no job control" not in spoken.heard
        await shell.resize(40, 120)
        await shell.send(b"stty size\n")
        await spoken.until(b"40 120")
        await shell.send(b"sleep 300; echo status $?\n")
        await eventually(lambda: sleepers(sandbox), what="it sleeps")
        await shell.send(b"\x03")
        await spoken.until(b"ready> ")
        await shell.send(b"echo status $?\n")
        await spoken.until(b"status 130")
        await shell.send_eof()
        assert (await spoken.end())["exit_code"] == 0


async def test_the_terminal_is_the_controlling_one(sandbox):
    """Red when the terminal is only stdin and stdout: password prompts and pagers open /dev/tty."""
    async with await sandbox.attach(["sh", "-c", "echo heard > /dev/tty"], terminal=(10, 10)) as command:
        spoken = Spoken(command)
        await spoken.end()
    assert spoken.heard == b"heard\r\n"


async def test_the_exit_of_a_terminal_s_command_is_told(sandbox):
    async with await sandbox.attach(["sh", "-c", "exit 4"], terminal=(10, 10)) as command:
        assert (await Spoken(command).end())["exit_code"] == 4


async def test_hanging_up_kills_the_command(sandbox):
    """Red when a closed websocket is not noticed: a terminal's daemons would stay, too."""
    async with await sandbox.attach("(setsid sleep 300 &); sleep 301", terminal=(10, 10)):

        async def both():
            return len(await sleepers(sandbox)) == 2

        await eventually(both, what="the command runs")

    async def gone():
        return await sleepers(sandbox) == []

    await eventually(gone, what="its processes are gone")


async def test_the_time_limit_holds(sandbox):
    async with await sandbox.attach("sleep 300", terminal=(10, 10), timeout_s=0.5) as command:
        assert (await Spoken(command).end())["timed_out"]


async def test_a_command_that_cannot_start_is_refused_with_the_reason(sandbox):
    async with await sandbox.attach(["/no/such/program"]) as command:
        with pytest.raises(OperationRefused) as refused:
            await Spoken(command).end()
    assert refused.value.code == "cannot_start"


async def test_a_later_attempt_ends_it(host, sandbox, client):
    """Red when the successor leaves the terminal of the old attempt open."""
    async with await sandbox.attach("bash", terminal=(10, 10)) as shell:
        spoken = Spoken(shell)
        ending = asyncio.create_task(spoken.end())
        successor = await host.sandbox(client, key=sandbox.fence.key, attempt=2)
        assert (await successor.exec("echo fine")).stdout == b"fine\n"
        with pytest.raises(StaleAttempt):
            await ending
    with pytest.raises(StaleAttempt):
        await sandbox.attach("true")
    await successor.close()


async def test_without_a_token_there_is_nothing(client):
    with pytest.raises(SandboxTokenInvalid):
        await client.attach("nonsense", {"command": "true"})


@pytest.mark.parametrize(
    "first", ["{}", "[", '{"command": "true", "surprise": 1}', '{"command": []}', b"\x00"]
)
async def test_a_first_message_that_is_no_command_is_refused(sandbox, client, first):
    """Red when the host fails instead: the socket would close without a word."""
    await sandbox.exec("true")
    headers = {"Authorization": f"Bearer {await sandbox._sign_token()}"}
    async with client._opened().ws_connect("/sandbox/attach", headers=headers) as socket:
        await (socket.send_bytes(first) if isinstance(first, bytes) else socket.send_str(first))
        answer = await socket.receive_json(timeout=30)
    assert (answer["event"], answer["code"]) == ("error", "invalid_request")


@pytest.mark.parametrize(
    "word", ["x", '{"resize": {"rows": 0, "columns": 5}}', '{"input": "more"}', "[" * 10_000]
)
async def test_what_cannot_be_understood_ends_the_command(sandbox, client, word):
    await sandbox.exec("true")
    headers = {"Authorization": f"Bearer {await sandbox._sign_token()}"}
    async with client._opened().ws_connect("/sandbox/attach", headers=headers) as socket:
        await socket.send_str('{"command": "sleep 300", "stdin": true}')
        assert (await socket.receive_json(timeout=30))["event"] == "started"
        await socket.send_str(word)
        answer = await socket.receive(timeout=30)
        assert answer.type == aiohttp.WSMsgType.TEXT
        assert answer.json()["code"] == "invalid_request"

    async def gone():
        return await sleepers(sandbox) == []

    await eventually(gone, what="the command is gone")
