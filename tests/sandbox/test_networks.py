"""Networks and rules of sandboxes are made, repaired and removed; what is not ours is left alone."""

import asyncio
import ipaddress
import json
import os
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager

import pytest

from sandfleet.fleet.host import firewall, networks
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.host.firewall import Firewall, FirewallError
from sandfleet.fleet.host.networks import NetworkRefused, Networks
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.shared.errors import HostUnavailable, NoRoom
from tests.sandbox.conftest import uninstalled
from tests.waiting import eventually

# A pool of these tests' own, which no host uses; and one that holds a single network.
POOL = ipaddress.IPv4Network("10.253.224.0/24")
ONE = ipaddress.IPv4Network("10.253.225.16/28")
FILE = '[templates.open]\nnetwork = "egress"\n'


@asynccontextmanager
async def networks_of(engine, pool):
    """Networks of an instance of its own, and none of them left."""
    instance = f"test-{uuid.uuid4().hex[:12]}"
    async with Engine(engine) as docker:
        made = Networks(docker, pool, {"sandfleet": "1", "sandfleet.instance": instance})
        try:
            yield made, instance
        finally:
            await made.sweep(set)
            made.close()
            await uninstalled()


async def names(engine, instance):
    async with Engine(engine) as docker:
        filters = json.dumps({"label": [f"sandfleet.instance={instance}"]})
        return {n["Name"] for n in await docker.call("GET", "/networks", params={"filters": filters})}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sandfleet.toml"
    path.write_text(FILE)
    return str(path)


async def test_a_network_is_a_bridge_of_ours_with_labels(engine):
    """Red when a network cannot be told from others', by the rules or by who clears up."""
    name = f"sandfleet-{uuid.uuid4().hex[:12]}"
    before = set(firewall.bridges())
    async with networks_of(engine, POOL) as (made, instance):
        await made.open(name, {})
        assert set(firewall.bridges()) == before, "the trial is gone"
        await made.create(name, {"sandfleet.sandbox": "x"})
        async with Engine(engine) as docker:
            found = await docker.call("GET", f"/networks/{name}")
        assert found["Labels"] == {"sandfleet": "1", "sandfleet.instance": instance, "sandfleet.sandbox": "x"}
        assert ipaddress.IPv4Network(found["IPAM"]["Config"][0]["Subnet"]).subnet_of(POOL)
        assert not found["EnableIPv6"]
        assert set(firewall.bridges()) - before == {found["Options"]["com.docker.network.bridge.name"]}
        await made.remove(name)
        await made.remove(name)
        assert set(firewall.bridges()) == before


async def test_a_pool_that_is_used_up_says_so(engine):
    """Red when the engine's own words, or another pool's network, are the answer."""
    first, second = (f"sandfleet-{uuid.uuid4().hex[:12]}" for _ in range(2))
    async with networks_of(engine, ONE) as (made, instance):
        await made.create(first, {})
        with pytest.raises(NoRoom, match=r"All 1 networks of this host's pool 10.253.225.16/28 are in use"):
            await made.create(second, {})
        assert await names(engine, instance) == {first}
        await made.remove(first)
        await made.create(second, {})
        await made.remove(second)


async def test_two_hosts_share_a_pool(engine):
    """Red when a host only knows of its own networks, or gives up when another took one first."""
    pool = ipaddress.IPv4Network("10.253.226.0/26")  # four networks
    async with networks_of(engine, pool) as (one, _), networks_of(engine, pool) as (two, _):
        made = [(host, f"sandfleet-{uuid.uuid4().hex[:12]}") for host in (one, two, one, two)]
        await asyncio.gather(*(host.create(name, {}) for host, name in made))
        await asyncio.gather(*(host.remove(name) for host, name in made))


async def test_a_pool_in_the_way_of_a_route_is_refused_before_anything_is_made(engine):
    """Red when a pool takes over addresses that the machine sends elsewhere: its users would be cut off."""
    before = set(firewall.bridges())
    interface = f"sft{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "link", "add", interface, "type", "bridge"], check=True)
    try:
        for command in (
            ["link", "set", interface, "up"],
            ["route", "add", "10.253.227.0/24", "dev", interface],
        ):
            subprocess.run(["ip", *command], check=True)
        async with networks_of(engine, ipaddress.IPv4Network("10.253.227.128/25")) as (made, instance):
            with pytest.raises(
                NetworkRefused, match=rf"overlaps the route to 10.253.227.0/24 by {interface}: set"
            ):
                await made.open("sandfleet-trial", {})
            assert await names(engine, instance) == set()
            with pytest.raises(NoRoom, match="are in use"):
                await made.create("sandfleet-late", {})
    finally:
        subprocess.run(["ip", "link", "del", interface], check=True)
    assert set(firewall.bridges()) == before


async def test_who_is_not_root_is_refused(engine, monkeypatch):
    """Red when networks are made without rules."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with Engine(engine) as docker:
        made = Networks(docker, POOL, {"sandfleet": "1", "sandfleet.instance": "test-not-root"})
        with pytest.raises(NetworkRefused, match="does not run as root"):
            await made.open("sandfleet-trial", {})
        with pytest.raises(HostUnavailable, match="need root"):
            await made.create("sandfleet-late", {})
    assert await names(engine, "test-not-root") == set()


async def test_a_host_that_may_not_make_networks_goes_on_without(own_host, file):
    """Red when the whole host ends for one template: here the pool is in the way of the machine's own routes."""
    address = subprocess.run(["ip", "-4", "-j", "route"], capture_output=True, check=True).stdout
    taken = next(route["dst"] for route in json.loads(address) if "/" in route["dst"])
    host = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_NETWORK_POOL=taken)
    await host.start()
    client = SandboxClient(host.socket)
    refused = await host.sandbox(client)
    refused.choose_template("open")
    with pytest.raises(TemplateUnavailable, match=r"Template 'open' has network = \"egress\", but the pool"):
        await refused.exec("true")
    sandbox = await host.sandbox(client)
    assert (await sandbox.exec("echo works")).stdout == b"works\n"
    await sandbox.close()
    await client.aclose()
    assert any("overlaps the route" in line["message"] for line in host.logged() if line["level"] == "ERROR")


async def test_bwrap_has_no_networks_and_says_so(own_host, file):
    host = own_host("bwrap", SANDFLEET_TEMPLATES=file)
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    sandbox.choose_template("open")
    with pytest.raises(TemplateUnavailable, match="bwrap makes no networks"):
        await sandbox.exec("true")
    await client.aclose()


async def test_an_engine_in_another_network_namespace_is_refused(engine, monkeypatch):
    """Red when a container gets a network that the rules of this machine do not see."""
    monkeypatch.setattr(networks, "bridges", list)
    async with networks_of(engine, POOL) as (made, instance):
        with pytest.raises(NetworkRefused, match="works in another network namespace"):
            await made.open("sandfleet-trial", {})
        assert await names(engine, instance) == set()


@pytest.mark.parametrize(
    "damage",
    ["delete table inet sandfleet", "flush chain inet sandfleet from_sandboxes", "flush ruleset inet"],
)
async def test_damaged_rules_are_repaired(damage):
    """Red when only the table's name is looked for: a firewall that is reloaded flushes what is in it."""
    rules = Firewall()
    async with firewall.held():
        await rules.ensure()
        assert not await rules.ensure_again(), "whole rules are left alone"
        subprocess.run(["nft", *damage.split()], check=True)
        assert await rules.ensure_again()
        listed = subprocess.run(
            ["nft", "list", "table", "inet", "sandfleet"], capture_output=True, check=True
        )
        assert b"169.254.0.0/16" in listed.stdout
        assert not await rules.ensure_again()
    await uninstalled()


async def test_rules_that_go_while_they_are_looked_at_are_not_there(monkeypatch):
    """Red when a table that another process has removed between two looks is taken for a firewall that does not work."""
    look = firewall._nft

    async def removed_meanwhile(*arguments, **options):
        seen = await look(*arguments, **options)
        subprocess.run(["nft", "delete", "table", "inet", "sandfleet"], capture_output=True, check=False)
        return seen

    async with firewall.held():
        await Firewall().ensure()
        monkeypatch.setattr(firewall, "_nft", removed_meanwhile)
        assert not await firewall.installed()


_FLOOD = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    s.sendto(b"x", ("10.253.228.1", 9))
    time.sleep(0.0002)
"""


async def test_rules_are_replaced_without_a_gap():
    """Red when they are removed before they are made anew: a sandbox would reach the machine for that moment.

    A namespace behind an interface with the bridges' prefix stands for the sandbox, and floods the machine.
    """
    space, interface = f"sft{os.getpid():x}gap", f"{firewall.BRIDGE_PREFIX}{os.getpid():x}"
    rules, in_use = Firewall(), await firewall.hold()
    await rules.ensure()
    heard = []

    class Ear(asyncio.DatagramProtocol):
        def datagram_received(self, data, address):
            heard.append(address)

    for command in (
        f"netns add {space}",
        f"link add {interface} type veth peer name eth0 netns {space}",
        f"addr add 10.253.228.1/30 dev {interface}",
        f"link set {interface} up",
        f"-n {space} addr add 10.253.228.2/30 dev eth0",
        f"-n {space} link set eth0 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    ear, _ = await asyncio.get_running_loop().create_datagram_endpoint(Ear, local_addr=("10.253.228.1", 9))
    flood = await asyncio.create_subprocess_exec("ip", "netns", "exec", space, sys.executable, "-c", _FLOOD)
    try:
        for _ in range(30):
            rules._whole = None
            assert await rules.ensure()
        assert heard == []
        os.close(in_use)
        await uninstalled()
        await eventually(lambda: heard, what="without rules the flood arrives")
    finally:
        flood.kill()
        await flood.wait()
        ear.close()
        subprocess.run(["ip", "netns", "del", space], check=True)


async def test_a_running_host_repairs_the_rules(own_host, file):
    """Red when they are checked at the start only."""
    host = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_NETWORK_POOL=str(POOL))
    await host.start()
    subprocess.run(["nft", "delete", "table", "inet", "sandfleet"], check=True)

    def told():
        return any("are repaired" in line["message"] for line in host.logged())

    await eventually(told, what="the host says that it repaired the rules")
    assert await firewall.installed()
    assert await host.stop() == 0
    await uninstalled()


async def test_rules_in_use_are_not_uninstalled(engine):
    """Red when an uninstall opens the machine to sandboxes that still run."""
    async with networks_of(engine, POOL) as (made, _):
        await made.create("sandfleet-in-use", {})
        with pytest.raises(FirewallError, match="networks of sandboxes are up"):
            await firewall.uninstall()
        assert await firewall.installed()


async def test_a_killed_hosts_networks_are_removed_at_its_next_start(own_host, file, engine):
    """Red when only containers are swept: each crash would cost the pool a network for ever."""
    host = own_host(SANDFLEET_TEMPLATES=file, SANDFLEET_NETWORK_POOL=str(POOL))
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    sandbox.choose_template("open")
    await sandbox.exec("true", timeout_s=60)
    assert await names(engine, host.instance)
    host.process.kill()
    await host.process.wait()
    await host.set_status(sandbox.fence.key, "error")
    await host.start()

    async def gone():
        return not await names(engine, host.instance)

    await eventually(gone, what="its network is gone")
    await client.aclose()
    assert await host.stop() == 0
    await uninstalled()


async def test_what_is_not_ours_is_left_alone(engine):
    """Red when networks, tables or bridges are recognised by less than label, name and prefix."""
    table = f"other_{uuid.uuid4().hex[:8]}"
    name = f"sandfleet-{uuid.uuid4().hex[:12]}"
    subprocess.run(["nft", "add", "table", "inet", table], check=True)
    async with Engine(engine) as docker:
        await docker.call("POST", "/networks/create", body={"Name": name, "Labels": {"sandfleet": "1"}})
        try:
            async with networks_of(engine, POOL) as (made, _):
                await made.open("sandfleet-trial", {})
                await made.sweep(set)
            assert (await docker.call("GET", f"/networks/{name}"))["Name"] == name
            subprocess.run(["nft", "list", "table", "inet", table], check=True, capture_output=True)
        finally:
            await docker.call("DELETE", f"/networks/{name}")
            subprocess.run(["nft", "delete", "table", "inet", table], check=True)
    with pytest.raises(EngineError):
        async with Engine(engine) as docker:
            await docker.call("GET", f"/networks/{name}")
