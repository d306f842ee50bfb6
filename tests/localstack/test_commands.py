"""The commands as a person uses them: a demo that proves itself, and a stack that stays up and goes without a trace."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from langgraph_sdk import get_client

from sandfleet.localstack import dev_file, docker_api
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.leftovers import LABEL, processes_of
from sandfleet.localstack.supervisor import Supervisor
from tests.fixtures_servers import TestServers
from tests.waiting import eventually

ASKED: Any = {"messages": [{"role": "user", "content": "Which numbers are prime?"}]}
COMMAND = [sys.executable, "-c", "from sandfleet.localstack.entry import main; main()"]


def environment(engine: str, **more: str) -> dict[str, str]:
    """The environment of a command: the session's engine, embedded servers unless ``more`` names others."""
    return {
        **os.environ,
        "DATABASE_URL": "",
        "REDIS_URL": "",
        "AWS_ENDPOINT_URL": "",
        "DOCKER_HOST": engine,
        **more,
    }


@asynccontextmanager
async def dev(
    root: Path, engine: str, **more: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, StackInfo]]:
    """A running ``sandfleet dev``, stopped by SIGINT if the test has not ended it."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "dev", "--root", str(root),
        env=environment(engine, **more), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    said = []
    try:
        async with asyncio.timeout(300):
            async for line in process.stdout:
                said.append(line.decode())
                if "is ready  http" in said[-1]:
                    break
            else:
                raise AssertionError(f"sandfleet dev ended: {''.join(said)}")
        yield process, dev_file.read(root / "dev.json")
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 180)


async def test_the_demo_succeeds_and_leaves_nothing(engine: str, tmp_path: Path) -> None:
    """Breaks if any part of a run is broken, or anything stays behind."""
    root = tmp_path / "stack"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "demo", "--root", str(root),
        env=environment(engine), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 600)
    text = out.decode()
    assert process.returncode == 0, text
    assert "25 primes below 100" in text
    assert "total_ms" in text
    assert "\x1b[" not in text
    instance = Supervisor(root).instance
    assert processes_of(instance) == []
    assert docker_api.labelled(engine, f"{LABEL}={instance}") == []
    assert not (root / "dev.json").exists()


async def test_a_stack_uses_the_servers_it_is_given(
    engine: str, tmp_path: Path, database: str, redis_url: str, servers: TestServers
) -> None:
    """And starts none of its own then. Breaks if `start_servers` ignores the environment."""
    aws = servers.aws_endpoint_url
    more = {"DATABASE_URL": database, "REDIS_URL": redis_url, "AWS_ENDPOINT_URL": aws}
    async with dev(tmp_path / "stack", engine, **more) as (_, info):
        assert (info.database_url, info.redis_url, info.aws_endpoint_url) == (database, redis_url, aws)
        assert set(info.processes) == {"api", "executor-1", "host", "provider"}


async def test_what_dies_comes_back_and_dev_json_tells_where(engine: str, tmp_path: Path) -> None:
    """An executor killed with SIGKILL is restarted and serves. Breaks without `restart` in `dev`."""
    root = tmp_path / "stack"
    async with dev(root, engine) as (_, info):
        os.kill(info.processes["executor-1"], signal.SIGKILL)

        def restarted() -> bool:
            return dev_file.read(root / "dev.json").processes.get("executor-1", 0) not in (
                0,
                info.processes["executor-1"],
            )

        await eventually(restarted, what="a new executor in dev.json")
        async with get_client(url=info.api_url, api_key=info.api_key) as client:
            values = await client.runs.wait(None, "hello", input=ASKED)
        assert values


async def test_a_stack_killed_with_sigkill_goes_without_a_trace(engine: str, tmp_path: Path) -> None:
    """Processes and the sandbox of a running agent alike. Breaks without the watchdog."""
    root = tmp_path / "stack"
    async with dev(root, engine) as (process, info):
        label = f"{LABEL}={info.instance}"
        async with get_client(url=info.api_url, api_key=info.api_key) as client:
            await client.runs.create(None, "coder", input=ASKED)
            await eventually(lambda: docker_api.labelled(engine, label), what="a sandbox")
        process.kill()
        await eventually(lambda: not docker_api.labelled(engine, label), what="no container")
        await eventually(lambda: not processes_of(info.instance), what="no process")
        await eventually(lambda: not (root / "dev.json").exists(), what="no address of a stack that is gone")
