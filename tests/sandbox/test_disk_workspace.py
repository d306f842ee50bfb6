"""Workspaces on disk: larger than memory, of a fixed size, and gone with their container whoever is killed when."""

import asyncio
import os
import shutil
import subprocess
import uuid
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path

import psycopg
import pytest

from sandfleet.fleet.host import disk
from sandfleet.fleet.host.docker_backend import DockerBackend
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.shared.errors import NoRoom
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import read_templates
from tests.sandbox.conftest import bucket_env, containers
from tests.sandbox.test_kill_from_outside import launched
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


SYNCS = """
import os, time
fd, began = os.open("f", os.O_RDWR | os.O_CREAT), time.monotonic()
for n in range(100):
    os.pwrite(fd, os.urandom(4096), 4096 * n)
    os.fsync(fd)
print(time.monotonic() - began)
"""
READS = """
import os, time
fd = os.open("f", os.O_RDWR | os.O_CREAT)
os.write(fd, os.urandom(12 << 20))
os.fdatasync(fd)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
began = time.monotonic()
os.lseek(fd, 0, 0)
while os.read(fd, 1 << 20):
    pass
print(time.monotonic() - began)
"""


async def test_what_it_reads_and_syncs_is_limited(own_host, tmp_path):
    """Red without the rates of the device: one sandbox then takes the disk from all others."""
    path = tmp_path / "slow.toml"
    path.write_text(f'{FILE}disk_rate = "4MiB"\ndisk_iops = 50\n')
    host = own_host(SANDFLEET_TEMPLATES=str(path))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await disk_sandbox(host, client)
        for attack in (SYNCS, READS):
            result = await sandbox.exec(["python3", "-c", attack], timeout_s=300)
            assert float(result.stdout) > 1.5, "a kernel that limits takes two seconds or more for it"
        await sandbox.close()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 100 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_what_is_promised_is_reserved(small_disk, tmp_path):
    """Also when several are made at once. Red when files are sparse: together they may fill the machine's disk, and the host's
    own state with it."""
    async with AsyncExitStack() as stack:

        async def make(size):
            return await stack.enter_async_context(disk.workspace(small_disk, size * MIB, 1000, 1000))

        # One that finds no room has taken what there was for a moment, so another may find none either.
        made = await asyncio.gather(*(make(40) for _ in range(3)), return_exceptions=True)
        refused = [result for result in made if not isinstance(result, str)]
        assert {type(result) for result in refused} == {NoRoom}, made
        for _ in refused[1:]:
            made.append(await make(40))
        with pytest.raises(NoRoom):
            await make(19)  # of 20 MiB: some stays free
        device = next(result for result in made if isinstance(result, str))
        inside = tmp_path / "inside"
        inside.mkdir()
        subprocess.run(["mount", "-o", disk.MOUNT_OPTIONS, device, inside], check=True)
        try:
            free = shutil.disk_usage(small_disk).free
            (inside / "file").write_bytes(bytes(20 * MIB))
            os.sync()
            (inside / "file").unlink()
            os.sync()
            assert shutil.disk_usage(small_disk).free == free, "neither taken nor given back"
        finally:
            subprocess.run(["umount", inside], check=True)


async def test_a_host_gives_no_more_than_it_is_to_give(own_host, file):
    """And tells PostgreSQL what it gives. Red when disk is no part of a host's capacity."""
    host = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_HOST_DISK_BYTES=str(500 * MIB))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        first, second = [await disk_sandbox(host, client) for _ in range(2)]
        await first.exec("true")
        with pytest.raises(NoRoom):
            await client.acquire(host.token(second.fence), "disk")

        async def told():
            async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
                cursor = await connection.execute("select disk, disk_taken from hosts")
                return await cursor.fetchone() == (500 * MIB, 300 * MIB)

        await eventually(told, what="PostgreSQL hears of it")
        await first.close()


async def test_a_template_that_no_disk_holds_is_refused_at_the_start(own_host, file):
    """Red when runs wait for room that can never be."""
    host = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_HOST_DISK_BYTES=str(200 * MIB))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        with pytest.raises(TemplateUnavailable, match="this host gives 200 MiB"):
            await (await disk_sandbox(host, client)).exec("true")


async def test_what_others_write_on_its_disk_takes_room_for_as_long_as_it_is_there(
    own_host, tmp_path, small_disk
):
    """Red when a host's room on disk is what was free at its start."""
    file = tmp_path / "sandfleet.toml"
    file.write_text('[templates.disk]\nworkspace = "40MiB"\nworkspace_on = "disk"\ninodes = 2000\n')
    others = small_disk / "others"
    others.write_bytes(bytes(80 * MIB))
    host = own_host(SANDFLEET_TEMPLATES=str(file), SANDFLEET_HOST_DIR=str(small_disk / "host"))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        first, second = [await disk_sandbox(host, client) for _ in range(2)]
        with pytest.raises(NoRoom):
            await client.acquire(host.token(first.fence), "disk")
        others.unlink()
        await first.exec("true")
        others.write_bytes(bytes(30 * MIB))
        with pytest.raises(NoRoom):
            await client.acquire(host.token(second.fence), "disk")
        others.unlink()
        await second.exec("true")
        await first.close()
        await second.close()
    await host.stop()


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


async def test_files_that_the_kernel_remembers_are_not_memory_that_ran_out(engine, file, tmp_path):
    """Red when all that counts for a sandbox is taken for used: who is killed for another reason would look for memory."""
    config = Settings(docker_host=engine, host_dir=tmp_path, templates=Path(file))
    templates = read_templates(config)
    backend = DockerBackend(config, templates, f"test-{uuid.uuid4().hex[:12]}")
    async with launched(backend, tmp_path, template=templates.templates["disk"]) as (sandbox, run):
        assert (await run("head -c 200M /dev/zero > large", timeout_s=100))["exit_code"] == 0
        async with Engine(engine) as docker:
            stats = await docker.call(
                "GET", f"/containers/{sandbox.handle}/stats", params={"stream": "false", "one-shot": "true"}
            )
        assert stats["memory_stats"]["usage"] > 90 * MIB, "the kernel keeps what it has room for"
        assert await backend.exhausted(sandbox.handle) is None


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
