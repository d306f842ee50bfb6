"""``sandfleet sandbox``: sandboxes without a run, and a shell in one."""

import asyncio
import os
import sys
from contextlib import aclosing
from pathlib import Path

from rich.table import Table

from sandfleet.fleet.sandbox_client import ApiError, ExecResult, Process, SandboxApi
from sandfleet.localstack import dev_file, raw_terminal
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.terminal import err, out

_SHELL = "export LANG=${LANG:-C.UTF-8}; command -v bash >/dev/null && exec bash -i; exec sh -i"
"""The language is for what is typed: without one, a line with an umlaut is shown as numbers."""
_SCRIPT = "command -v bash >/dev/null && exec bash -s; exec sh -s"
_SCRIPT_S = 3600.0  # as long as a sandbox lives unless its maker says otherwise
_BY_SIGNAL = 128


def connect(root: Path) -> SandboxApi:
    """The API of ``SANDFLEET_API_URL`` (with ``SANDFLEET_API_KEY``), else of the stack that runs in ``root``."""
    if url := os.environ.get("SANDFLEET_API_URL"):
        return SandboxApi(url, os.environ.get("SANDFLEET_API_KEY", ""))
    info = dev_file.read(root / "dev.json")
    return SandboxApi(info.api_url, info.api_key)


async def create(root: Path, template: str, ttl_s: float | None) -> int:
    """Make a sandbox and print its id."""
    async with connect(root) as api:
        out.print((await api.create(template, ttl_s=ttl_s)).sandbox_id)
    return 0


async def ls(root: Path, limit: int) -> int:
    """Print the newest sandboxes of the caller as a table."""
    async with connect(root) as api:
        found = await api.search(limit=limit)
    table = Table(box=None, pad_edge=False)
    templates = max((len(sandbox["template"]) for sandbox in found), default=0)
    # A narrow terminal breaks lines rather than cut off what is to be copied or read.
    columns = {"sandbox": 36, "template": max(templates, 8), "generation": 10, "created": 19, "ends": 19}
    for title, width in columns.items():
        table.add_column(title, no_wrap=True, min_width=width)
    for sandbox in found:
        times = [str(sandbox[name])[:19] for name in ("created_at", "expires_at")]
        table.add_row(sandbox["sandbox_id"], sandbox["template"], str(sandbox["generation"]), *times)
    out.print(table if found else "No sandboxes. Make one: sandfleet sandbox create")
    return 0


async def rm(root: Path, sandbox_ids: list[str]) -> int:
    """End sandboxes."""
    async with connect(root) as api:
        for sandbox_id in sandbox_ids:
            await (await api.get(sandbox_id)).delete()
    return 0


async def execute(root: Path, sandbox_id: str, command: list[str]) -> int:
    """Run a command, several words as they are or one text for the shell, and end with its exit code. What comes through a
    pipe is its input."""
    stdin = None if sys.stdin.isatty() else await asyncio.to_thread(sys.stdin.buffer.read)
    async with connect(root) as api:
        sandbox = await api.get(sandbox_id)
        told = command[0] if len(command) == 1 else command
        result = await sandbox.exec(told, stdin=stdin, on_output=_shown)
    if result.timed_out:
        err.print(f"Killed after {result.duration_ms / 1000:.0f} s, the time limit of its template.")
    return _exit_code(result)


def _shown(stream: str, data: bytes) -> None:
    target = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    target.write(data)
    target.flush()


def _exit_code(ended: ExecResult | Process) -> int:
    return ended.exit_code if ended.exit_code is not None else _BY_SIGNAL + (ended.signal or 0)


async def shell(root: Path, template: str, ttl_s: float | None) -> int:
    """A shell in a fresh sandbox, which ends with it. It reads the terminal, or the script that comes through a pipe."""
    if not sys.stdin.isatty():
        return await _script(root, template, ttl_s)
    if not raw_terminal.is_there():
        raise LocalStackError(
            "A shell that is typed into shows itself in a terminal, and the output is none. Pipe the commands in, too: "
            "echo 'ls' | sandfleet sandbox shell"
        )
    async with connect(root) as api, await api.create(template, ttl_s=ttl_s) as sandbox:
        process = await sandbox.start(_SHELL, stdin=True, terminal=raw_terminal.size(), hold=True)

        async def resized() -> None:
            await process.resize(*raw_terminal.size())

        with raw_terminal.raw(), raw_terminal.on_resize(resized):
            await _connect_terminal(process)
    return _exit_code(process)


async def _script(root: Path, template: str, ttl_s: float | None) -> int:
    """What comes through a pipe, read by a shell without a terminal: both outputs apart, and the exit code of the last command."""
    script = await asyncio.to_thread(sys.stdin.buffer.read)
    async with connect(root) as api, await api.create(template, ttl_s=ttl_s) as sandbox:
        result = await sandbox.exec(
            _SCRIPT, stdin=script, timeout_s=_SCRIPT_S if ttl_s is None else ttl_s, on_output=_shown
        )
    if result.timed_out:
        err.print(f"Killed after {result.duration_ms / 1000:.0f} s; --ttl gives it longer.")
    return _exit_code(result)


async def _connect_terminal(process: Process) -> None:
    """Until the shell ends, or the terminal does."""

    async def type_in() -> None:
        async with aclosing(raw_terminal.keys()) as typed:
            async for data in typed:
                try:
                    await process.write(data)
                except ApiError as error:
                    if error.code != "no_stdin":  # it has ended, which its output tells
                        raise
                    await asyncio.Event().wait()

    async def show() -> None:
        async with aclosing(process.output()) as output:
            async for data in output:
                await raw_terminal.show(data)

    ways = [asyncio.ensure_future(type_in()), asyncio.ensure_future(show())]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
