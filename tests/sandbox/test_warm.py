"""The warm pool: sandboxes that are started and frozen before anybody asks."""

import asyncio
import signal
import uuid
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.shared.errors import NoRoom
from tests.fixtures_engine import IMAGE
from tests.sandbox.conftest import check_empty, containers
from tests.waiting import eventually

BACKENDS = pytest.mark.parametrize("backend", ["docker", "bwrap"])


async def warm(host, count):
    """Wait until so many are ready."""

    async def ready():
        return (await host.health())["warm"] == count

    await eventually(ready, what=f"{count} warm sandboxes")


def created(host):
    return [line for line in host.logged() if line["message"] == "sandbox created"]


@BACKENDS
async def test_the_first_use_takes_a_warm_one(own_host, backend):
    """Red when an acquire starts a sandbox although one is ready, or the pool is not filled again."""
    host = own_host(backend, SANDFLEET_WARM_SANDBOXES="1")
    await host.start()
    await warm(host, 1)
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    assert (await sandbox.exec("echo warm; touch mine; ls")).stdout == b"warm\nmine\n"
    assert [line["warm"] for line in created(host)] == [True]
    await warm(host, 1)
    assert (await host.health())["sandboxes"] == 1, "one that nobody has yet is not counted as taken"
    await sandbox.close()
    await client.aclose()


async def test_a_warm_one_is_frozen_until_it_is_taken(own_host):
    """Red when idle sandboxes may use CPU time."""
    host = own_host("docker", SANDFLEET_WARM_SANDBOXES="1")
    await host.start()
    await warm(host, 1)
    (container,) = await containers(host)

    async def frozen():
        async with Engine(host.docker_host) as engine:
            found = await engine.call("GET", f"/containers/{container['Id']}/json")
            top = psutil.Process(found["State"]["Pid"])
            cgroup = Path(f"/proc/{top.pid}/wchan").read_text()
        return found["State"]["Paused"] or "freez" in cgroup or "refrigerator" in cgroup

    assert await frozen()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    await sandbox.exec("true")
    await host.set_status(sandbox.fence.key, "success")
    await client.aclose()


async def test_without_a_container_the_agent_is_stopped(own_host):
    """Red when the other backend does not freeze."""
    host = own_host("bwrap", SANDFLEET_WARM_SANDBOXES="1")
    await host.start()
    await warm(host, 1)
    assert psutil.STATUS_STOPPED in {process.status() for process in host.processes()}


async def test_the_containers_name_says_whose_it_is(own_host):
    """Red when nobody can see which run a sandbox belongs to that was started without one: labels cannot be changed."""
    host = own_host("docker", SANDFLEET_WARM_SANDBOXES="1")
    await host.start()
    await warm(host, 1)
    (before,) = await containers(host)
    assert "-run-" not in before["Names"][0]
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    await sandbox.exec("true")

    async def names():
        found = {c["Id"]: c["Names"][0] for c in await containers(host)}
        return found[before["Id"]].endswith(f"-run-{sandbox.fence.key.run_id}")

    await eventually(names, what="the container is named after its run")
    await sandbox.close()
    await client.aclose()


async def test_two_runs_never_get_the_same_one(own_host):
    """Red when taking one is two steps: files of one run would be seen by another."""
    host = own_host("docker", SANDFLEET_WARM_SANDBOXES="3", SANDFLEET_WARM_REFILL_PER_S="50")
    await host.start()
    await warm(host, 3)
    client = SandboxClient(host.socket)
    sandboxes = [await host.sandbox(client) for _ in range(5)]
    results = await asyncio.gather(*(s.exec(f"touch {n}; ls; id -u") for n, s in enumerate(sandboxes)))
    seen = [result.stdout.split() for result in results]
    assert [files for files, _ in seen] == [str(n).encode() for n in range(5)]
    assert len({uid for _, uid in seen}) == 5, "kernel limits count per user id"
    assert sum(line["warm"] for line in created(host)) >= 3
    await asyncio.gather(*(s.close() for s in sandboxes))
    await client.aclose()


@BACKENDS
async def test_an_old_one_is_replaced(own_host, backend):
    """Red when a warm sandbox stays for ever, with a template and an agent of long ago."""
    host = own_host(backend, SANDFLEET_WARM_SANDBOXES="1", SANDFLEET_WARM_AGE_S="0.2")
    await host.start()
    folder = host.folder / "host" / "sandboxes"
    seen = set()

    def third():
        seen.update(path.name for path in folder.iterdir())
        return len(seen) >= 3

    await eventually(third, what="a third warm sandbox")


@BACKENDS
async def test_one_that_ends_by_itself_is_replaced(own_host, backend):
    """Red when a dead sandbox is handed out."""
    host = own_host(backend, SANDFLEET_WARM_SANDBOXES="1", SANDFLEET_WARM_REFILL_PER_S="50")
    await host.start()
    await warm(host, 1)
    if backend == "docker":
        (container,) = await containers(host)
        async with Engine(host.docker_host) as engine:
            await engine.remove_container(container["Id"])
    else:
        stopped = [p for p in host.processes() if p.status() == psutil.STATUS_STOPPED]
        stopped[0].kill()
    await eventually(lambda: "warm sandbox lost" in host.log.read_text(), what="the loss is noticed")
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    await sandbox.close()
    await client.aclose()


@BACKENDS
async def test_warm_ones_take_no_room_from_runs(own_host, backend):
    """Red when warm sandboxes are not counted, or are not given up for one that somebody waits for."""
    host = own_host(backend, SANDFLEET_WARM_SANDBOXES="5", SANDFLEET_HOST_SANDBOXES="2")
    await host.start()
    await warm(host, 2)
    client = SandboxClient(host.socket)
    first, second, third = [await host.sandbox(client) for _ in range(3)]
    await asyncio.gather(first.exec("true"), second.exec("true"))
    with pytest.raises(NoRoom):
        await third.exec("true")
    health = await host.health()
    assert (health["room"], health["sandboxes"], health["warm"]) == (0, 2, 0)
    await asyncio.gather(first.close(), second.close())
    await client.aclose()


@BACKENDS
async def test_frozen_sandboxes_go_with_their_host(own_host, backend):
    """Red when a stop leaves warm sandboxes behind, which cannot notice that their host is gone."""
    host = own_host(backend, SANDFLEET_WARM_SANDBOXES="2")
    await host.start()
    await warm(host, 2)
    assert await host.stop() == 0
    await check_empty(host)


async def test_frozen_sandboxes_of_a_killed_host_are_removed_by_the_next(own_host):
    """Red when only sandboxes of runs are swept."""
    host = own_host("docker", SANDFLEET_WARM_SANDBOXES="2")
    await host.start()
    await warm(host, 2)
    old = {c["Id"] for c in await containers(host)}
    host.process.send_signal(signal.SIGKILL)
    await host.process.wait()
    assert {c["Id"] for c in await containers(host)} == old
    await host.start()

    async def gone():
        return not old & {c["Id"] for c in await containers(host)}

    await eventually(gone, what="the old ones are removed")


async def test_a_template_that_cannot_be_started_keeps_no_other_from_being_warm(own_host, tmp_path):
    """Red when the first that is missing is always tried first, or its failures delay all."""
    name = f"sandfleet-test-{uuid.uuid4().hex[:12]}:one"
    file = tmp_path / "sandfleet.toml"
    file.write_text(f'[templates.broken]\nimage = "{name}"\nwarm = 1\n[templates.fine]\nwarm = 1\n')
    host = own_host("docker", SANDFLEET_TEMPLATES=str(file))
    async with Engine(host.docker_host) as engine, aclosing(SandboxClient(host.socket)) as client:
        repo, tag = name.split(":")
        await engine.call("POST", f"/images/{IMAGE}/tag", params={"repo": repo, "tag": tag})
        await host.start()
        await warm(host, 2)
        await engine.call("DELETE", f"/images/{name}")
        broken, fine = [await host.sandbox(client) for _ in range(2)]
        broken.choose_template("broken")
        fine.choose_template("fine")
        await broken.exec("true")
        await eventually(lambda: "no warm sandbox could be started" in host.log.read_text(), what="it fails")
        await fine.exec("true")
        await warm(host, 1)
        assert [line["warm"] for line in created(host)] == [True, True]
        await asyncio.gather(broken.close(), fine.close())
