"""Two hosts, each in a network namespace as on a machine of its own: reached by TCP, and cut off from PostgreSQL."""

import os
import random
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import NoSandbox, StaleAttempt
from sandfleet.shared.errors import HostUnavailable
from tests.sandbox.conftest import check_empty, containers
from tests.sandbox.cut import Proxy
from tests.sandbox.host_process import Host
from tests.sandbox.internet import ip
from tests.sandbox.test_reaper import REAPS, passes
from tests.waiting import eventually


class Machine(NamedTuple):
    """A host in a namespace, the way to PostgreSQL from there, and a client by either transport."""

    host: Host
    way: Proxy
    by_tcp: SandboxClient
    by_socket: SandboxClient


@contextmanager
def namespace():
    """A namespace with a cable: its name, this end's address, and that end's."""
    name = f"sftm{os.getpid():x}-{uuid.uuid4().hex[:2]}"
    # Of the range for measuring networks; several sessions share the machine.
    first = f"198.19.{random.randrange(256)}.{random.randrange(1, 63) * 4}".rsplit(".", 1)
    near, far = (f"{first[0]}.{int(first[1]) + n}" for n in (1, 2))
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "outside", "netns", name)
        ip("addr", "add", f"{near}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{far}/30", "dev", "outside")
        ip("-n", name, "link", "set", "outside", "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, near, far
    finally:
        ip("netns", "del", name)


@pytest.fixture(scope="module")
async def machines(servers, engine, tmp_path_factory):
    """Two of them with one database and one key."""
    database_url = await servers.create_database()
    secret = uuid.uuid4().hex
    made = []
    with namespace() as one, namespace() as two:
        for number, (name, near, far) in enumerate((one, two)):
            way = await Proxy(database_url, near).__aenter__()
            env = {**REAPS, "SANDFLEET_HOST_LISTEN": f"{far}:0", "DATABASE_URL": way.url}
            folder: Path = tmp_path_factory.mktemp(f"machine{number}")
            host = Host(folder, database_url, "docker", engine, env, secret=secret, namespace=name)
            await host.start()
            url = (await host.health())["remote"]
            made.append(Machine(host, way, SandboxClient(url), SandboxClient(host.socket)))
        yield made
        for machine in made:
            await machine.by_tcp.aclose()
            await machine.by_socket.aclose()
            assert await machine.host.stop() == 0
            await check_empty(machine.host)
            await machine.way.cut()
    await servers.drop_database(database_url)


async def test_tokens_say_which_run_on_either_machine(machines):
    """Red when hosts are reached only from their own machine, or one serves the other's sandboxes."""
    one, two = machines
    sandbox = await one.host.sandbox(one.by_tcp)
    assert (await sandbox.exec("echo far")).stdout == b"far\n"
    with pytest.raises(NoSandbox):
        await two.by_tcp.read(await two.host.signer(sandbox.fence)(), "work", 0, 1)
    await sandbox.close()


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("successor", ["by_tcp", "by_socket"])
async def test_a_superseded_executor_is_refused_on_both_transports(machines, successor, cut_off):
    """Red when attempts are compared per transport, or only while PostgreSQL answers."""
    one, _ = machines
    old = [await one.host.sandbox(one.by_tcp)]
    old.append(await one.host.sandbox(one.by_socket, key=old[0].fence.key))
    for each in old:
        await each.write_file("work", b"half")
    if cut_off:
        await one.way.cut()
    try:
        new = await one.host.sandbox(getattr(one, successor), key=old[0].fence.key, attempt=2)
        assert await new.read_file("work") == b"half"
        for each in old:
            with pytest.raises(StaleAttempt):
                await each.exec("true")
        assert (await new.exec("echo on")).stdout == b"on\n"
    finally:
        if cut_off:
            await one.way.mend()
    await new.close()


@pytest.mark.long
async def test_a_host_that_is_cut_off_serves_but_takes_and_reaps_nothing(machines):
    """Red when it makes sandboxes that nobody may know of, removes what it cannot ask about, or is taken for dead."""
    one, two = machines
    sandbox = await one.host.sandbox(one.by_tcp)
    await sandbox.write_file("work", b"half")
    await one.way.cut()
    try:
        await one.host.set_status(sandbox.fence.key, "success")

        async def for_long():
            return (await one.host.health())["database_age_s"] > 16

        await eventually(for_long, what="it knows that it is cut off")
        assert await sandbox.read_file("work") == b"half"
        new = await one.host.sandbox(one.by_tcp)
        with pytest.raises(HostUnavailable, match="cut off from PostgreSQL"):
            await one.by_tcp.acquire(await one.host.signer(new.fence)())
        assert passes(two.host) == [], "the other host sees that it lives"
        assert len(await containers(one.host)) == 1
    finally:
        await one.way.mend()
    await check_empty(one.host)  # it hears of the run's end
