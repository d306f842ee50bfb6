"""``sandfleet snapshot-cost``: what it takes to save and to restore a workspace, by its size and by what is in it."""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from rich import box
from rich.table import Table

from sandfleet.fleet.host import labels
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.localstack.connection import client_of
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.stack import OWNER, Stack
from sandfleet.localstack.terminal import Steps, out
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.sandbox_token import sign

_TIMES = 3
_TOKEN_S = 3600.0
_PAUSE_S = 0.05
_KIB, _MIB = 1024, 1024 * 1024
_WAITS = {"words": 1_000_000, "chunk_delay_ms": 1000}  # a run that holds its sandbox and uses nothing else
# Python's library again and again: what people's files are like, as far as packing goes.
_SOURCE = (
    "while cat $(python3 -c 'import os; print(os.path.dirname(os.__file__))')/*.py; do :; done 2> /dev/null"
)


@dataclass(frozen=True)
class Content:
    """A workspace: its size, what is in it, and the command that makes it."""

    size: int
    what: str
    command: str


def _one_file(size: int, shown: str) -> list[Content]:
    return [
        Content(size, f"{shown}, random", f"head -c {size} /dev/urandom > file"),
        Content(size, f"{shown}, source code", f"{{ {_SOURCE}; }} | head -c {size} > file"),
    ]


_CONTENTS = [
    Content(0, "empty", "true"),
    *_one_file(_KIB, "1 KiB"),
    *_one_file(_MIB, "1 MiB"),
    Content(_MIB, "1 MiB, random, 1,024 files", "head -c 1M /dev/urandom | split -a 4 -b 1K - file"),
    *_one_file(10 * _MIB, "10 MiB"),
    *_one_file(100 * _MIB, "100 MiB"),
]


async def snapshot_cost(root: Path, project: Path, largest_mib: int) -> int:
    """Start a stack and print the table; workspaces of more than ``largest_mib`` are left out."""
    say = Steps()
    stack = Stack(root, project, say=say)
    table = Table(
        title=f"Snapshots, medians of {_TIMES}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("workspace", no_wrap=True)
    for heading in (
        "archive, bytes",
        "save, ms",
        "CPU: host",
        "sandbox",
        "restore, ms",
        "CPU: host",
        "sandbox",
    ):
        table.add_column(heading, justify="right")
    try:
        await stack.start()
        async with aclosing(await Measured.of(stack)) as measured:
            for content in _CONTENTS:
                if content.size <= largest_mib * _MIB:
                    say(content.what)
                    table.add_row(content.what, *await measured.row(content))
    finally:
        await stack.stop()
        out.print(table)
    out.print(
        "[dim]Archive in KiB, all else in ms: until save and restore had ended, and the CPU time of the host and of the sandbox. A restore makes the sandbox, too.[/]"
    )
    return 0


class Measured:
    """The sandbox of a run that does nothing, used around its executor."""

    def __init__(self, stack: Stack, key: RunKey) -> None:
        if stack.info.docker_host is None:
            raise LocalStackError("Measured are containers: set SANDFLEET_SANDBOX=docker, with an engine.")
        self._token = sign(stack.host_secret, Fence(key, 1), time.time() + _TOKEN_S)
        self._client = SandboxClient(Path(stack.info.host_socket))
        self._docker_host = stack.info.docker_host
        self._host = psutil.Process(stack.info.processes["host"])

    @classmethod
    async def of(cls, stack: Stack) -> "Measured":
        """Start the run."""
        prompt = "wait #script:" + json.dumps(_WAITS)
        async with client_of(stack.info) as client:
            thread = await client.threads.create()
            asked: Any = {"messages": [{"role": "user", "content": prompt}]}
            run = await client.runs.create(thread["thread_id"], "hello", input=asked)
            while run["status"] != "running":
                await asyncio.sleep(_PAUSE_S)
                run = await client.runs.get(thread["thread_id"], run["run_id"])
        return cls(stack, RunKey(*OWNER, UUID(run["run_id"])))

    async def row(self, content: Content) -> list[str]:
        """Make the workspace, save and restore it; the figures as text."""
        saved, restored, archive_bytes = [], [], 0
        sandbox_id = (await self._client.acquire(self._token))["sandbox_id"]
        await self._run(f"rm -rf /workspace/*; cd /workspace; {content.command}")
        for _ in range(_TIMES):
            used_s = await self._sandbox_s(sandbox_id)
            wall_s, host_s, answer = await self._timed(self._client.snapshot(self._token, "interrupt"))
            archive_bytes = answer["bytes"]
            saved.append((wall_s, host_s, await self._sandbox_s(sandbox_id) - used_s))
            await self._client.remove(self._token)
            wall_s, host_s, answer = await self._timed(self._client.acquire(self._token))
            assert answer["restored"] is not None
            sandbox_id = answer["sandbox_id"]
            restored.append((wall_s, host_s, await self._sandbox_s(sandbox_id)))
        return [f"{archive_bytes / _KIB:,.0f}", *_medians(saved), *_medians(restored)]

    async def aclose(self) -> None:
        """Close the connections; the run ends with its stack."""
        await self._client.aclose()

    async def _run(self, command: str) -> None:
        request = {"command": command, "timeout_s": 120.0}
        async for event in self._client.exec(self._token, request, 120.0):
            assert event["event"] != "exit" or event["exit_code"] == 0, event

    async def _timed(self, call: Awaitable[dict[str, Any]]) -> tuple[float, float, dict[str, Any]]:
        """Seconds until the answer, CPU seconds of the host's process meanwhile, and the answer."""
        before_s, begun = self._host_s(), time.monotonic()
        answer = await call
        return time.monotonic() - begun, self._host_s() - before_s, answer

    def _host_s(self) -> float:
        used = self._host.cpu_times()
        return used.user + used.system

    async def _sandbox_s(self, sandbox_id: str) -> float:
        """CPU seconds that the sandbox has used since it was made."""
        async with Engine(self._docker_host) as engine:
            (container,) = await engine.containers(f"{labels.SANDBOX}={sandbox_id}")
            stats = await engine.call(
                "GET", f"/containers/{container['Id']}/stats", params={"stream": "false", "one-shot": "true"}
            )
        return float(stats["cpu_stats"]["cpu_usage"]["total_usage"]) / 1e9


def _medians(costs: list[tuple[float, float, float]]) -> list[str]:
    """Of each of the three, in milliseconds."""
    return [f"{1000 * statistics.median(values):,.0f}" for values in zip(*costs, strict=True)]
