"""What the agent cannot kill the host kills with the sandbox, and says so with the reason."""

import asyncio
import os
import shutil
import signal
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandfleet.fleet import sandbox_agent
from sandfleet.fleet.host import sandbox as sandbox_module
from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.bwrap_backend import BwrapBackend
from sandfleet.fleet.host.docker_backend import DockerBackend
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import DEFAULT, read_templates
from tests.sandbox.inside import FILL_MEMORY, UNTIL_ONE_IS_KILLED

TEMPLATES = read_templates(Settings())


@asynccontextmanager
async def launched(
    backend, folder, source=Path(sandbox_agent.__file__).parent, template=TEMPLATES.templates[DEFAULT]
):
    """A sandbox in this process, and a way to run a command in it that gives the last event."""
    await backend.open()
    fence = Fence(RunKey("acme", "ada", uuid.uuid4()), 1)
    sandbox = await Sandbox.launch(
        backend,
        fence.key,
        folder / "sandboxes",
        AgentFiles(folder / "agent", source),
        template,
    )
    serving = asyncio.create_task(sandbox.serve())

    async def run(command, timeout_s):
        spec = {"shell": command, "timeout_s": timeout_s, "output_bytes": 1000}
        events = [event async for event in sandbox.exec(fence, spec, None)]
        return events[-1][1]

    try:
        yield sandbox, run
    finally:
        await sandbox.destroy()
        await serving
        await backend.close()


async def test_what_the_agent_gives_up_on_goes_with_its_sandbox(tmp_path):
    """Red when the host only passes the agent's word on: the command would run on in a sandbox that looks well.

    An agent whose signals do nothing stands for processes that nothing inside can kill.
    """
    source = shutil.copytree(Path(sandbox_agent.__file__).parent, tmp_path / "source")
    with (source / "tree.py").open("a") as module:
        module.write("\n\nos.kill = lambda *_: None\nUNKILLABLE_S = 0.2\n")
    async with launched(BwrapBackend(TEMPLATES), tmp_path, source) as (_, run):
        for _ in range(2):
            with pytest.raises(SandboxLost, match="a command in it could not be killed"):
                await run("sleep 300", timeout_s=0.1)


async def test_a_sandbox_killed_with_its_memory_full_says_so(engine, tmp_path, monkeypatch):
    """Red when the reason is only that a command could not be killed: a user would look for a stuck program."""
    monkeypatch.setattr(sandbox_module, "_KILL_TIMEOUT_S", 0.5)
    backend = DockerBackend(Settings(docker_host=engine), TEMPLATES, f"test-{uuid.uuid4().hex[:12]}")
    async with launched(backend, tmp_path) as (sandbox, run), Engine(engine) as docker:
        assert (await run(f"{FILL_MEMORY}{UNTIL_ONE_IS_KILLED}", timeout_s=600))["out_of_memory"]
        container = await docker.call("GET", f"/containers/{sandbox.handle}/json")
        os.kill(container["State"]["Pid"], signal.SIGSTOP)
        with pytest.raises(SandboxLost, match=r"it ran out of memory \(512 MiB\)"):
            await run("true", timeout_s=0.1)
