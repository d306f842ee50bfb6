"""Hosts that were killed and never come back: another one removes what they left, and nothing else."""

import asyncio
import os
import signal
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

from sandfleet.fleet.host import firewall
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from tests.sandbox.conftest import containers, uninstalled
from tests.sandbox.cut import Proxy
from tests.waiting import eventually

FILE = '[templates.open]\nnetwork = "egress"\n'
# The pause between passes, and the grace: longer than the two seconds between beats of a host that lives.
REAPS = {"SANDFLEET_REAP_EVERY_S": "0.5", "SANDFLEET_REAP_GRACE_S": "5"}
WARM = {
    "SANDFLEET_WARM_REFILL_PER_S": "1000",
    "SANDFLEET_HOST_MEMORY_BYTES": str(2**40),
    "SANDFLEET_HOST_PIDS": str(2**22),
}
REMOVED = "removed what hosts that are gone have left"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sandfleet.toml"
    path.write_text(FILE)
    return str(path)


async def warm(host, number, deadline_s=120.0):
    """Wait until so many are ready: they are frozen, so that they never notice the end of their host."""

    async def ready():
        return (await host.health())["warm"] == number

    await eventually(ready, deadline_s, "the warm pool is full")


async def known(host):
    """Whether PostgreSQL has a row for it."""
    async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
        rows = await connection.execute("select 1 from hosts where instance = %s", (host.instance,))
        return await rows.fetchone() is not None


def folders(host):
    """What a host has in its folder, but for the lock: sandboxes, and the folders that every host makes."""
    folder = host.folder / "host"
    names = [f"sandboxes/{path.name}" for path in (folder / "sandboxes").iterdir()]
    return names + [name for name in ("state", "agent", "snapshots") if (folder / name).exists()]


async def networks(host):
    async with Engine(host.docker_host) as engine:
        label = f'{{"label": ["sandfleet.instance={host.instance}"]}}'
        return await engine.call("GET", "/networks", params={"filters": label})


async def gone(host, deadline_s=120.0):
    async def nothing_is_left():
        return not (await containers(host) or await networks(host) or folders(host) or await known(host))

    await eventually(nothing_is_left, deadline_s, "containers, networks, folders and the row are gone")


def passes(host):
    """What the passes of a host's reaper that removed something have removed."""
    return [
        (line["containers"], line["networks"], line["folders"])
        for line in host.logged()
        if line["message"] == REMOVED
    ]


@pytest.mark.parametrize(
    "number", [12, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_what_killed_hosts_have_left_is_gone_within_two_passes(own_host, number):
    """Red when only a host's own next life removes what it left, or a pass stops at the first thing."""
    dead = [own_host(SANDFLEET_WARM_SANDBOXES=str(number // 2), **WARM) for _ in range(2)]
    for host in dead:
        await host.start()
    for host in dead:
        await warm(host, number // 2, 900.0)
    for host in dead:
        await host.kill()
    reaper = own_host(**REAPS)
    await reaper.start()
    begun = time.monotonic()
    for host in dead:
        await gone(host, 900.0)
    print(
        f"{number} sandboxes of killed hosts: gone {time.monotonic() - begun:.1f} s after a host began to look"
    )
    await eventually(lambda: sum(each[0] for each in passes(reaper)) == number, what="all are counted")
    assert len(passes(reaper)) <= 2
    assert await reaper.stop() == 0


async def test_what_a_host_was_killed_over_at_its_start_is_removed(own_host, file, tmp_path):
    """Red when a host does not know the deployment before it tries what it can make, or labels what it tries by less: nobody
    could tell whose it is."""
    (tmp_path / "networks.trial").write_text("kill")
    dead = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_FAULT_POINTS=str(tmp_path))
    with pytest.raises(AssertionError):
        await dead.start()
    assert len(await networks(dead)) == 1
    reaper = own_host(**REAPS)
    await reaper.start()

    async def no_network():
        return not await networks(dead)

    await eventually(no_network, 120.0, "the network is gone")
    assert await reaper.stop() == 0


async def test_it_goes_on_after_it_was_killed_at_any_point(own_host, file, tmp_path):
    """Red when a host is forgotten before all of its things are gone: nobody would know of the rest."""
    points = tmp_path / "points"
    points.mkdir()
    dead = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_WARM_SANDBOXES="2", **WARM)
    await dead.start()
    client = SandboxClient(dead.socket)
    sandbox = await dead.sandbox(client)
    sandbox.choose_template("open")
    await sandbox.exec("true", timeout_s=60)
    await warm(dead, 2)
    await dead.kill()
    await client.aclose()
    reaper = own_host(**REAPS, SANDFLEET_FAULT_POINTS=str(points))
    for point in ("one", "containers", "networks", "folder", "forgotten"):
        (points / f"reaper.{point}").write_text("kill")
        await reaper.start()
        async with asyncio.timeout(120):
            await reaper.process.wait()
        assert not (points / f"reaper.{point}").exists(), f"it was killed at {point}"
        left = (
            bool(await containers(dead)),
            bool(await networks(dead)),
            bool(folders(dead)),
            await known(dead),
        )
        assert sorted(left) == list(left), "containers go first, then networks and folders, and the row last"
    await reaper.start()
    await gone(dead)
    assert await reaper.stop() == 0
    await uninstalled()


@asynccontextmanager
async def container(docker_host, **labels):
    """A container that was made by nobody here."""
    labels = {"sandfleet": "1", **{f"sandfleet.{name}": value for name, value in labels.items()}}
    body = {
        "Image": "sandfleet-sandbox:latest",
        "Cmd": ["true"],
        "Labels": labels,
        "HostConfig": {"NetworkMode": "none"},
    }
    async with Engine(docker_host) as engine:
        made = (await engine.call("POST", "/containers/create", body=body))["Id"]
        try:
            yield made
        finally:
            await engine.remove_container(made)


async def exists(docker_host, name):
    async with Engine(docker_host) as engine:
        return any(c["Id"] == name for c in await engine.containers("sandfleet=1"))


async def deployment(host):
    async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
        return (await (await connection.execute("select deployment_id::text from deployment")).fetchone())[0]


async def test_what_it_did_not_label_and_what_lives_is_left_alone(own_host, tmp_path):
    """Red when another deployment's things are taken for abandoned, those of a live host, or files that are no sandbox's."""
    reaper, lives, dead = own_host(**REAPS), own_host(SANDFLEET_WARM_SANDBOXES="1"), own_host()
    for host in (reaper, lives, dead):
        await host.start()
    await warm(lives, 1)
    await dead.kill()
    theirs = dead.folder / "host" / "sandboxes" / "notes.txt"
    theirs.write_text("mine")
    ours = await deployment(reaper)
    unknown = {"host": f"unknown-{uuid.uuid4().hex}", "folder": str(tmp_path / "nowhere")}
    async with (
        container(reaper.docker_host, deployment=ours, **unknown) as abandoned,
        container(reaper.docker_host, deployment=str(uuid.uuid4()), **unknown) as foreign,
        container(reaper.docker_host, deployment=ours) as nobodys,
    ):

        async def removed():
            return not await exists(reaper.docker_host, abandoned) and not await known(dead)

        await eventually(removed, what="what a host left that PostgreSQL does not know is gone")
        assert await exists(reaper.docker_host, foreign)
        assert await exists(reaper.docker_host, nobodys)
        assert len(await containers(lives)) == 1
    assert theirs.read_text() == "mine"
    theirs.unlink()
    assert await lives.stop() == 0
    assert await reaper.stop() == 0


async def test_a_host_that_postgresql_does_not_hear_of_keeps_its_sandboxes(own_host):
    """Red when silence is taken for death: the folder's lock says that it lives."""
    cut_off = own_host(SANDFLEET_WARM_SANDBOXES="1")
    async with Proxy(cut_off.database_url) as proxy:
        cut_off.env["DATABASE_URL"] = proxy.url
        await cut_off.start()
        await warm(cut_off, 1)
        await proxy.cut()
        reaper = own_host(**REAPS)
        await reaper.start()

        def told():
            return any(
                line["message"] == "PostgreSQL does not hear of a host that lives" for line in reaper.logged()
            )

        await eventually(told, what="the reaper has looked at it")
        assert passes(reaper) == []
        assert len(await containers(cut_off)) == 1
        assert await reaper.stop() == 0
        assert await cut_off.stop() == 0


@pytest.mark.long
async def test_a_host_that_comes_back_waits_until_its_things_are_removed(own_host, tmp_path):
    """Red when the folder's lock is given back before: the host would adopt what is then removed under its hands."""
    points = tmp_path / "points"
    points.mkdir()
    host = own_host()
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    await sandbox.exec("true")
    await client.aclose()
    await host.kill()
    (points / "reaper.networks").write_text("stop")
    reaper = own_host(**REAPS, SANDFLEET_FAULT_POINTS=str(points))
    await reaper.start()
    await eventually(lambda: not (points / "reaper.networks").exists(), 120, "the reaper stands still")
    starting = asyncio.create_task(host.start())

    def waits():
        said = any("waits for a reaper" in line["message"] for line in host.logged())
        return said or starting.done()

    await eventually(waits, 120, "the host has tried to take its folder")
    assert not starting.done()
    reaper.process.send_signal(signal.SIGCONT)
    await starting
    assert (await host.health())["sandboxes"] == 0
    assert not await containers(host)
    assert await host.stop() == 0
    assert await reaper.stop() == 0


async def test_it_waits_until_hosts_have_had_time_to_speak(own_host):
    """Red when it acts on silences that are its own, or the database's: a host has beaten for the grace first."""
    host = own_host(SANDFLEET_REAP_EVERY_S="0.1", SANDFLEET_REAP_GRACE_S="3600")
    await host.start()
    label = await deployment(host)
    async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
        await connection.execute(
            """insert into hosts select (jsonb_populate_record(h, '{"host_id": "long-gone", "folder": "/nowhere"}')).* from hosts h"""
        )
        await connection.execute("update hosts set heartbeat_at = '2000-01-01' where host_id = 'long-gone'")
    async with container(host.docker_host, deployment=label, host="long-gone", folder="/nowhere") as left:
        beats = host.log.stat().st_size

        async def beaten_at():
            async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
                cursor = await connection.execute(
                    "select heartbeat_at from hosts where host_id = %s", (host.host_id,)
                )
                return (await cursor.fetchone())[0]

        begun = await beaten_at()

        async def has_beaten_since():
            return await beaten_at() > begun  # 2 s, in which it could have looked twenty times

        await eventually(has_beaten_since, what="a beat")
        assert await exists(host.docker_host, left)
        assert host.log.stat().st_size == beats
    assert await host.stop() == 0


async def test_rules_that_nobody_uses_are_removed(own_host, file):
    """Red when killed hosts leave the machine's rules for ever, or when the rules of a live one are taken."""
    user = own_host(SANDFLEET_TEMPLATES=file)
    reaper = own_host(SANDFLEET_REAP_EVERY_S="0.2", SANDFLEET_REAP_GRACE_S="1")
    await user.start()
    await reaper.start()
    with pytest.raises(firewall.FirewallError):
        await firewall.uninstall()
    assert await firewall.installed()
    await user.kill()

    def used_by_others():
        """Whether a host shares them; whoever removes them has them for itself."""
        rules = f":{os.stat(firewall._NAMESPACE).st_ino} "
        return any(
            rules in lock and " READ " in lock for lock in Path("/proc/locks").read_text().splitlines()
        )

    async def removed_or_used_by_others():
        return not await firewall.installed() or used_by_others()

    await eventually(removed_or_used_by_others, what="the rules are gone")
    assert await reaper.stop() == 0


async def test_a_folder_of_its_own_that_is_no_sandboxes_is_removed(own_host):
    """Red when what a removal left half done stays until the next start. A new folder may be one that starts."""
    host = own_host()
    await host.start()
    sandboxes = host.folder / "host" / "sandboxes"
    old, new = sandboxes / "0123456789abcdef", sandboxes / "fedcba9876543210"
    for path in (new, old):
        path.mkdir()
    os.utime(old, (0, 0))
    await eventually(lambda: not old.exists(), what="the old one is gone")
    assert new.exists()
    new.rmdir()
    assert await host.stop() == 0
