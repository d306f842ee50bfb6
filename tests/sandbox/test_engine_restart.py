"""The Docker Engine restarts under a host: sandboxes and commands go on, and calls wait for it."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from sandfleet.fleet.host.base_image import ensure_image
from sandfleet.fleet.host.engine import Engine, EngineUnreachable
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.localstack import docker_api
from tests.sandbox.conftest import containers
from tests.waiting import eventually

IMAGE = "sandfleet-sandbox:latest"


class Daemon:
    """A Docker Engine of the test's own, as an operator should set it up: with live-restore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                "dockerd", "--live-restore", "--bridge=none", "--iptables=false", "--host", self.address,
                "--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec"),
                "--pidfile", str(self.folder / "pid"),
                stdout=log, stderr=log, env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
            )  # fmt: skip

    async def ready(self) -> None:
        async def answers():
            assert self.process.returncode is None, (self.folder / "log").read_text()[-3000:]
            return await asyncio.to_thread(docker_api.version, self.address)

        await eventually(answers, 120.0, "the engine answers")

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            await self.process.wait()


@pytest.fixture
async def daemon(engine):
    """``engine`` is wanted only because it installs what is missing."""
    folder = Path(tempfile.mkdtemp(prefix="sfe", dir="/tmp"))  # the path of a socket is short
    made = Daemon(folder)
    await made.start()
    await made.ready()
    await ensure_image(made.address, IMAGE)
    yield made
    await made.stop()
    for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
        if (path := mount.split()[1]).startswith(f"{folder}/"):
            subprocess.run(["umount", path], check=False)
    shutil.rmtree(folder, ignore_errors=True)


async def test_sandboxes_and_commands_outlive_a_restart_of_the_engine(daemon, own_host):
    """Red when commands go through the engine, when its absence is taken for the end of sandboxes, or when what is asked
    of it meanwhile fails."""
    host = own_host()
    host.docker_host = daemon.address
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    said = []
    running = asyncio.create_task(
        sandbox.exec(
            "echo on; until [ -e go ]; do sleep 0.1; done; echo over",
            timeout_s=600,
            on_output=lambda _, data: said.append(data),
        )
    )
    await eventually(lambda: said or running.done(), what="the command has begun")
    await daemon.stop()
    await sandbox.write_file("go", b"")
    assert (await running).stdout == b"on\nover\n", "it ends while the engine is away"
    other = await host.sandbox(client)
    # Asked once: an executor asks a host that refuses again for a while, and would not tell.
    coming = asyncio.create_task(client.acquire(await host.signer(other.fence)()))
    await daemon.start()
    await coming
    assert (await other.exec("echo new")).stdout == b"new\n", "a new sandbox waits for the engine"
    assert (await sandbox.read_file("go")) == b""
    assert len(await containers(host)) == 2
    await sandbox.close()
    await other.close()

    async def none_left():
        return not await containers(host)

    await eventually(none_left, what="the engine that came back removes them")
    await client.aclose()
    assert await host.stop() == 0


async def test_an_engine_that_was_never_there_is_told_at_once(tmp_path):
    """Red when a wrong address costs the patience that a restart is given."""
    with pytest.raises(EngineUnreachable):
        async with Engine(f"unix://{tmp_path}/nothing", patience_s=3600.0):
            pass
