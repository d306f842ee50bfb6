"""Workspaces on disk: larger than memory, of a fixed size, and gone with their container whoever is killed when."""

from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from sandfleet.fleet.host import disk
from sandfleet.fleet.host.docker_backend import DockerBackend
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import read_templates
from tests.sandbox.conftest import bucket_env, containers
from tests.waiting import eventually

MIB = 2**20
FILE = """
[templates.disk]
workspace_on = "disk"
workspace = "300MiB"
memory = "96MiB"
inodes = 2000
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sandfleet.toml"
    path.write_text(FILE)
    return str(path)


def loops(folder):
    """Loop devices over files below a folder."""
    backing = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # the device went meanwhile
            backing.append(path.read_text())
    return [file for file in backing if file.startswith(str(folder))]


async def disk_sandbox(host, client, **more):
    sandbox = await host.sandbox(client, **more)
    sandbox.choose_template("disk")
    return sandbox


async def test_it_holds_more_than_memory_and_not_more_than_its_size(own_host, file):
    """Red when the workspace is in memory, or when nothing limits its size or its number of files."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await disk_sandbox(host, client)
        filled = await sandbox.exec(
            "ls -A; head -c 1G /dev/zero > all; stat -c %s all; rm all", timeout_s=100
        )
        assert b"No space left on device" in filled.stderr
        assert 270 * MIB < int(filled.stdout) <= 300 * MIB, "and there is no lost+found"
        assert not filled.out_of_memory
        many = await sandbox.exec("i=0; while : > f$i; do i=$((i+1)); done 2> /dev/null; echo $i")
        assert 1900 < int(many.stdout) < 2200
        mounted = (await sandbox.exec("grep ' /workspace ' /proc/mounts")).stdout.decode().split()
        assert mounted[2] == "ext4"
        assert {"nosuid", "nodev"} <= set(mounted[3].split(","))
        assert len(loops(host.folder)) == 1
        await sandbox.close()
        await eventually(lambda: not loops(host.folder), what="the loop device is gone")


async def test_files_outlive_the_host_that_made_it(own_host, file):
    """Red when the device goes with the process that made it, or stays after the sandbox that its successor removes."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await disk_sandbox(host, client)
        await sandbox.write_file("kept", b"here")
        await host.kill()
        await host.start()
        assert await sandbox.read_file("kept") == b"here"
        await sandbox.close()
    await eventually(lambda: not loops(host.folder), what="the loop device is gone")


async def test_nothing_is_left_of_a_killed_host_and_its_container(own_host, file):
    """Red when whoever made the device has to clear it."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        await (await disk_sandbox(host, client)).exec("true")
    (container,) = await containers(host)
    await host.kill()
    async with Engine(host.docker_host) as engine:
        await engine.remove_container(container["Id"])
        await eventually(lambda: not loops(host.folder), what="the loop device is gone")

        async def no_volume():
            volumes = (await engine.call("GET", "/volumes"))["Volumes"] or []
            return not [v for v in volumes if "/dev/loop" in str((v.get("Options") or {}).get("device"))]

        await eventually(no_volume, what="the volume over the device is gone")
    await host.start()


async def test_a_snapshot_of_it_is_restored(own_host, file, servers):
    """Red when files on disk are not packed, or a new workspace of that kind takes none."""
    host = own_host(SANDFLEET_TEMPLATES=file, **await bucket_env(servers))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await disk_sandbox(host, client)
        await sandbox.exec("head -c 150M /dev/zero > zeros; echo here > kept")
        assert (await sandbox.snapshot())["skipped"] == 0
        await sandbox.close()
        again = await disk_sandbox(host, client, key=sandbox.fence.key, attempt=2)
        await client.acquire(host.token(again.fence), "disk")
        assert (await client.read(host.token(again.fence), "kept", 0, 10)) == b"here\n"
        assert (await client.call("GET", "/sandbox/stat", host.token(again.fence), params={"path": "zeros"}))[
            "size"
        ] == 150 * MIB
        await client.remove(host.token(again.fence))


async def test_a_host_that_has_no_loop_devices_says_so_at_its_start(engine, file, tmp_path, monkeypatch):
    """Red when a template is offered that no sandbox can be made of: a run would find out."""
    monkeypatch.setattr(disk, "_CONTROL", str(tmp_path / "none"))
    config = Settings(docker_host=engine, host_dir=tmp_path, templates=Path(file))
    backend = DockerBackend(config, read_templates(config), f"test-{tmp_path.name}")
    await backend.open()
    try:
        assert "no loop device can be used" in backend.refused["disk"]
        assert "default" not in backend.refused
    finally:
        await backend.close()


async def test_bwrap_refuses_it(own_host, file):
    host = own_host("bwrap", SANDFLEET_TEMPLATES=file)
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await disk_sandbox(host, client)
        with pytest.raises(TemplateUnavailable, match="needs a Docker Engine"):
            await sandbox.exec("true")
