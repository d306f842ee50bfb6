"""Sandboxes come with their first use and go with their run, whatever dies."""

import asyncio
import os
import signal
import time
from contextlib import aclosing, suppress

import psutil
import psycopg
import pytest

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.fleet.sandbox.hosts import OneHost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.errors import HostUnavailable, NoRoom
from sandfleet.shared.ids import Fence
from tests.sandbox.conftest import check_empty, containers
from tests.sandbox.cut import Proxy
from tests.waiting import eventually


async def hosts_row(host):
    async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
        cursor = await connection.execute(
            "select backend, room, sandboxes, address, heartbeat_at from hosts where instance = %s",
            (host.instance,),
        )
        return await cursor.fetchone()


async def test_a_sandbox_is_made_at_its_first_use(host, client, sandbox):
    """Red when the sandbox is made with its object: most runs never need one."""
    before = (await host.health())["sandboxes"]
    await sandbox.list_files()
    assert (before, (await host.health())["sandboxes"]) == (0, 1)


async def test_calls_at_once_make_one_sandbox(host, client):
    """Red when the second caller does not wait for the first one's creation."""
    key = await host.new_run()
    callers = [await host.sandbox(client, key=key) for _ in range(6)]
    await asyncio.gather(*(caller.exec(f"touch {n}") for n, caller in enumerate(callers)))
    assert (await host.health())["sandboxes"] == 1
    assert len((await callers[0].list_files())["entries"]) == 6
    await callers[0].close()


async def test_closing_removes_it_and_a_second_close_does_nothing(host, client):
    sandbox = await host.sandbox(client)
    await sandbox.close()
    await sandbox.exec("true")
    await sandbox.close()
    await sandbox.close()
    await check_empty(host)


async def test_the_next_attempt_finds_the_same_sandbox(host, client):
    """Red when a hand-over loses the workspace."""
    first = await host.sandbox(client)
    await first.write_file("work", b"half")
    second = await host.sandbox(client, key=first.fence.key, attempt=2)
    assert await second.read_file("work") == b"half"
    await second.close()


@pytest.mark.parametrize("status", ["success", "error", "timeout", "interrupted", "gone", "elsewhere"])
async def test_the_sandbox_of_a_run_that_is_over_is_reaped(host, client, status):
    """Red when only a close removes it: the executor died here, or the run went on on another host."""
    sandbox = await host.sandbox(client)
    await sandbox.exec("true")
    if status == "gone":
        async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
            await connection.execute("delete from runs where run_id = %s", (sandbox.fence.key.run_id,))
    elif status == "elsewhere":
        async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
            await connection.execute(
                "update placements set host_id = 'another' where run_id = %s", (sandbox.fence.key.run_id,)
            )
    else:
        await host.set_status(sandbox.fence.key, status)
    await check_empty(host)


async def test_the_sandbox_of_a_pending_run_stays(host, client):
    """Red when 'not running' is taken for 'over': a run that was handed over is pending."""
    sandbox = await host.sandbox(client)
    await sandbox.write_file("work", b"")
    await host.set_status(sandbox.fence.key, "pending")
    beat = (await hosts_row(host))[4]

    async def later():
        return (await hosts_row(host))[4] > beat

    await eventually(later)
    beat = (await hosts_row(host))[4]
    await eventually(later)
    assert await sandbox.read_file("work") == b""
    await sandbox.close()


async def test_the_host_registers_and_counts(host, sandbox):
    await sandbox.exec("true")

    async def counted():
        backend, room, sandboxes, address, _ = await hosts_row(host)
        return (backend, sandboxes, address) == (host.backend, 1, f"unix:{host.socket}") and room > 10

    await eventually(counted, what="the host's row says what it holds")


@pytest.mark.parametrize("backend", ["docker", "bwrap"])
async def test_sigterm_removes_all_sandboxes(own_host, backend):
    host = own_host(backend)
    await host.start()
    client = SandboxClient(host.socket)
    sandboxes = [await host.sandbox(client) for _ in range(3)]
    running = [asyncio.create_task(s.exec("echo on; sleep 300", timeout_s=600)) for s in sandboxes]

    async def all_there():
        return (await host.health())["sandboxes"] == 3

    await eventually(all_there)
    assert await host.stop() == 0
    await check_empty(host)
    assert await hosts_row(host) is None
    for each in running:  # which would wait for the next host
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await client.aclose()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["docker", "bwrap"])
async def test_the_death_of_the_host_ends_its_sandboxes(own_host, backend):
    """Red when a container outlives its host: the agent must end with its connection, the engine must remove it."""
    host = own_host(backend)
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    await sandbox.exec("(setsid sleep 300 &)")
    children = host.processes()
    host.process.kill()
    await host.process.wait()
    if backend == "docker":

        async def no_container():
            return not await containers(host)

        await eventually(no_container, what="the container is gone without the host")
    await eventually(lambda: not [c for c in children if c.is_running()], what="no process is left")
    await host.start()
    with pytest.raises(SandboxLost, match=r"restarted|ended while its host was away"):
        await sandbox.exec("true")
    assert (await sandbox.exec("echo anew")).stdout == b"anew\n"
    await client.aclose()


async def test_a_host_removes_what_an_earlier_life_left_and_nothing_else(own_host):
    """Red when leftovers stay, or when another instance's containers go too."""
    host = own_host()
    async with Engine(host.docker_host) as engine:
        made = []
        for instance in (host.instance, "another-instance-of-a-test"):
            labels = {"sandfleet": "1", "sandfleet.instance": instance}
            network = {"NetworkMode": "none"}
            body = {
                "Image": "sandfleet-sandbox:latest",
                "Cmd": ["sleep", "300"],
                "Labels": labels,
                "HostConfig": network,
            }
            made.append((await engine.call("POST", "/containers/create", body=body))["Id"])
        try:
            await engine.call("POST", f"/containers/{made[0]}/start")
            await host.start()
            assert await containers(host) == []
            assert len(await engine.containers("sandfleet.instance=another-instance-of-a-test")) == 1
        finally:
            for container in made:
                await engine.remove_container(container)


async def test_a_container_that_no_sandbox_owns_is_removed(docker_host, docker_client):
    """Red without the sweep: the engine's answer to a creation was lost, and nobody knows of the container."""
    sandbox = await docker_host.sandbox(docker_client)
    await sandbox.write_file("kept", b"")
    labels = {"sandfleet": "1", "sandfleet.instance": docker_host.instance}
    body = {"Image": "sandfleet-sandbox:latest", "Cmd": ["sleep", "300"], "Labels": labels}
    async with Engine(docker_host.docker_host) as engine:
        await engine.call("POST", "/containers/create", body=body)

    async def only_the_sandbox_is_left():
        return len(await containers(docker_host)) == 1

    await eventually(only_the_sandbox_is_left)
    assert await sandbox.read_file("kept") == b""
    await sandbox.close()


async def test_a_lost_sandbox_is_told_once_and_then_replaced(docker_host, docker_client):
    """Red when an empty workspace takes the lost one's place in silence, or when the run can never go on."""
    sandbox = await docker_host.sandbox(docker_client)
    await sandbox.write_file("work", b"")
    (container,) = await containers(docker_host)
    async with Engine(docker_host.docker_host) as engine:
        await engine.call("POST", f"/containers/{container['Id']}/kill")

    async def lost():
        return (await docker_host.health())["sandboxes"] == 0

    await eventually(lost)
    with pytest.raises(SandboxLost):
        await sandbox.list_files()
    assert (await sandbox.list_files())["entries"] == []
    await sandbox.close()


async def test_a_loss_is_told_to_the_successor_too(docker_host, docker_client):
    """Red when only an operation hears of the loss: a new attempt creates before it operates."""
    first = await docker_host.sandbox(docker_client)
    await first.exec("true")
    (container,) = await containers(docker_host)
    async with Engine(docker_host.docker_host) as engine:
        await engine.call("POST", f"/containers/{container['Id']}/kill")

    async def lost():
        return (await docker_host.health())["sandboxes"] == 0

    await eventually(lost)
    second = await docker_host.sandbox(docker_client, key=first.fence.key, attempt=2)
    with pytest.raises(SandboxLost):
        await second.exec("true")
    assert (await second.exec("echo anew")).stdout == b"anew\n"
    await second.close()


async def test_a_command_under_way_hears_of_the_loss(docker_host, docker_client):
    sandbox = await docker_host.sandbox(docker_client)
    begun = asyncio.Event()
    running = asyncio.create_task(
        sandbox.exec("echo on; sleep 300", timeout_s=600, on_output=lambda *_: begun.set())
    )
    await begun.wait()
    (container,) = await containers(docker_host)
    async with Engine(docker_host.docker_host) as engine:
        await engine.call("POST", f"/containers/{container['Id']}/kill")
    with pytest.raises(SandboxLost):
        await running
    await sandbox.close()


async def test_without_postgresql_the_host_goes_on(own_host):
    """Red when the host dies with its connection, refuses valid tokens, or reaps what it cannot ask about."""
    host = own_host()
    async with Proxy(host.database_url) as proxy:
        real_url, host.database_url = host.database_url, proxy.url
        await host.start()
        host.database_url = real_url
        client = SandboxClient(host.socket)
        sandbox = await host.sandbox(client)
        await sandbox.write_file("work", b"kept")
        await proxy.cut()
        await host.set_status(sandbox.fence.key, "success")
        age = (await host.health())["database_age_s"]

        async def older():
            return (await host.health())["database_age_s"] > age + 5

        await eventually(older, what="beats fail")
        assert await sandbox.read_file("work") == b"kept"
        await proxy.mend()
        await check_empty(host)
        assert any(line["message"] == "PostgreSQL answers again" for line in host.logged())
    await client.aclose()


async def test_a_sandbox_ends_at_its_lifetime_even_without_postgresql(own_host):
    """Red when nothing bounds a sandbox's life but the run's state."""
    host = own_host(SANDFLEET_SANDBOX_LIFETIME_S="4")
    async with Proxy(host.database_url) as proxy:
        real_url, host.database_url = host.database_url, proxy.url
        await host.start()
        host.database_url = real_url
        client = SandboxClient(host.socket)
        sandbox = await host.sandbox(client)
        await sandbox.exec("true")
        await proxy.cut()
        await check_empty(host)
        with pytest.raises(SandboxLost, match="lifetime"):
            await sandbox.exec("true")
    await client.aclose()


async def test_a_full_host_refuses(own_host):
    """Red when a host takes more than its memory holds."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = own_host(SANDFLEET_SANDBOX_MEMORY_BYTES=str(2 * memory + 4096))
    await host.start()
    assert (await host.health())["room"] == 1
    client = SandboxClient(host.socket)
    first, second = [await host.sandbox(client) for _ in range(2)]
    await first.exec("true")
    with pytest.raises(NoRoom):
        await second.exec("true")
    await first.close()

    async def room():
        return (await host.health())["room"] == 1

    await eventually(room, what="the first one is removed")
    assert (await second.exec("echo room")).stdout == b"room\n"
    await client.aclose()


async def test_without_a_host_the_error_says_what_to_do(tmp_path):
    client = SandboxClient(tmp_path / "none.sock")

    async def token():
        return "token"

    sandbox = RunSandbox(Fence(None, 1), token, OneHost(client))
    with pytest.raises(HostUnavailable, match="sandfleet dev"):
        await sandbox.exec("true")
    await sandbox.close()
    await client.aclose()


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"SANDFLEET_HOST_SECRET": ""}, "SANDFLEET_HOST_SECRET"),
        ({"SANDFLEET_SANDBOX_IMAGE": "no-such-image"}, "base_image"),
        ({"DOCKER_HOST": "unix:///no/such/socket"}, "SANDFLEET_SANDBOX=bwrap"),
        ({"SANDFLEET_SANDBOX_MEMORY_BYTES": "104857600"}, "SANDFLEET_SANDBOX_MEMORY_BYTES"),
        ({"SANDFLEET_HOST_SOCKET": "/tmp/" + "x" * 110}, "107 bytes"),
    ],
)
async def test_a_host_that_cannot_work_says_why_and_ends(own_host, env, complaint):
    host = own_host(**env)
    with pytest.raises(AssertionError):
        await host.start()
    assert host.process.returncode == 1
    assert complaint in host.logged()[-1]["message"]


async def test_a_second_host_in_the_same_folder_refuses_to_start(own_host):
    """Red without the lock: the second would remove the first one's sandboxes as leftovers."""
    host = own_host()
    await host.start()
    rival = own_host(SANDFLEET_HOST_DIR=str(host.folder / "host"))
    with pytest.raises(AssertionError):
        await rival.start()
    assert "SANDFLEET_HOST_DIR" in rival.logged()[-1]["message"]


async def test_time_to_first_output_is_noted(docker_host, docker_client):
    """The host logs how long a creation took, in ms."""
    sandbox = await docker_host.sandbox(docker_client)
    began = time.monotonic()
    await sandbox.exec("true")
    created = [line for line in docker_host.logged() if line["message"] == "sandbox created"][-1]
    assert 0 < created["ms"] <= (time.monotonic() - began) * 1000 + 1
    await sandbox.close()


async def test_a_paused_host_is_not_a_dead_one(own_host):
    """The sandbox works on, and has its say when the host goes on. Red when the agent has a time limit of its own on the
    connection: the pause lasts for as long as its command works."""
    host = own_host("bwrap")
    await host.start()

    def at_work():
        with suppress(psutil.Error):
            return any(process.cmdline() == ["sleep", "3"] for process in host.processes())

    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await host.sandbox(client)
        working = asyncio.create_task(sandbox.exec("sleep 3; echo done", timeout_s=600))
        await eventually(at_work, what="the command")
        os.kill(host.process.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: not at_work(), what="the command's end")
        finally:
            os.kill(host.process.pid, signal.SIGCONT)
        assert (await working).stdout == b"done\n"
