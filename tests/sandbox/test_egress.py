"""A sandbox with the policy ``egress`` reaches the internet and nothing near: every attack here is made from inside."""

import asyncio
import json
import socket
import subprocess
from contextlib import asynccontextmanager

import psutil
import pytest

from sandfleet.fleet.host import firewall
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from tests.sandbox.conftest import check_empty, containers, uninstalled
from tests.sandbox.host_process import Host
from tests.sandbox.internet import ADDRESS, HOST_ADDRESS, METADATA, internet
from tests.waiting import eventually

FILE = '[templates.open]\nnetwork = "egress"\n'
# Which of [address, port] pairs in argv take a connection, or answer a datagram.
_TCP = """
import concurrent.futures, json, socket, sys

def answers(target):
    try:
        socket.create_connection(target, float(sys.argv[2])).close()
    except OSError:
        return False
    return True
"""
_UDP = """
import concurrent.futures, json, socket, sys

def answers(target):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(float(sys.argv[2]))
        try:
            asking.sendto(b"anybody there?", tuple(target))
            asking.recv(100)
        except OSError:
            return False
    return True
"""
_ALL = """
targets = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as threads:
    print(json.dumps([target for target, yes in zip(targets, threads.map(answers, targets)) if yes]))
"""
_TCP += _ALL
_UDP += _ALL


@pytest.fixture(scope="module")
async def far():
    """The internet."""
    async with internet() as made:
        yield made


@pytest.fixture(scope="module")
async def egress_host(servers, engine, far, tmp_path_factory):
    """A host with the template ``open``, whose name server is the internet's."""
    folder = tmp_path_factory.mktemp("egress")
    file = folder / "sandfleet.toml"
    file.write_text(FILE)
    database_url = await servers.create_database()
    env = {"SANDFLEET_TEMPLATES": str(file), "SANDFLEET_SANDBOX_DNS": json.dumps([ADDRESS])}
    host = Host(folder, database_url, "docker", engine, env)
    await host.start()
    yield host
    assert await host.stop() == 0
    await check_empty(host)
    await servers.drop_database(database_url)
    await uninstalled()


@pytest.fixture
async def open_client(egress_host):
    client = SandboxClient(egress_host.socket)
    yield client
    await client.aclose()


@pytest.fixture
async def opened(egress_host, open_client):
    """A sandbox with egress."""
    sandbox = await egress_host.sandbox(open_client)
    sandbox.choose_template("open")
    yield sandbox
    await sandbox.close()
    await check_empty(egress_host)


async def ask(sandbox, program, targets, patience_s=1.0):
    """Those of the targets that answer a program in the sandbox."""
    result = await sandbox.exec(
        ["python3", "-c", program, json.dumps(targets), str(patience_s)], timeout_s=120
    )
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def own_addresses():
    """Every IPv4 address of this machine, bridges and gateways included."""
    return sorted(
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    )


@asynccontextmanager
async def listener(host="0.0.0.0", family=socket.AF_INET):
    """A TCP server on this machine: its port."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0, family=family)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_it_reaches_the_internet(opened, far):
    """Red when the rules close more than what is near, or the engine does not translate the address."""
    assert await ask(opened, _TCP, [[ADDRESS, far.port]], 30) == [[ADDRESS, far.port]]


async def test_it_resolves_names_with_the_public_name_server(opened, far):
    """Red when the sandbox asks the machine's own resolver."""
    result = await opened.exec(
        "python3 -c \"import socket; print(socket.gethostbyname('example.org'))\"", timeout_s=60
    )
    assert result.stdout.decode().strip() == ADDRESS, result.stderr
    assert "example.org" in far.asked_names()


async def test_no_address_of_the_machine_answers(opened, far):
    """Red without the rule on addresses of the machine: this listener is on all of them, public ones and gateways."""
    await opened.exec("true")
    async with listener() as port:
        addresses = own_addresses()
        assert HOST_ADDRESS in addresses
        assert any(address.startswith("10.253.") for address in addresses), "the sandbox's own gateway is one"
        targets = [[address, port] for address in addresses]
        for address, _ in targets:
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
        assert await ask(opened, _TCP, targets) == []


async def test_no_address_of_the_machine_answers_a_datagram(opened):
    """Red when only TCP is closed."""

    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport):
            self.transport = transport

        def datagram_received(self, data, address):
            self.transport.sendto(data, address)

    await opened.exec("true")
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Echo, local_addr=("0.0.0.0", 0))
    try:
        port = transport.get_extra_info("sockname")[1]
        assert await ask(opened, _UDP, [[address, port] for address in own_addresses()]) == []
    finally:
        transport.close()


async def test_the_metadata_of_the_cloud_does_not_answer(opened, far):
    """Red without the rule on private ranges: the machine itself reaches it."""
    with socket.create_connection((METADATA, 80), 10):
        pass
    assert await ask(opened, _TCP, [[METADATA, 80], [METADATA, far.port]]) == []


async def test_the_servers_of_the_stack_do_not_answer(opened, servers):
    """PostgreSQL, Redis and SQS, on whatever address of the machine."""
    urls = (servers.at.database_url, servers.at.redis_url, servers.at.aws_endpoint_url)
    ports = [int(url.rsplit(":", 1)[1].split("/")[0]) for url in urls]
    await opened.exec("true")
    targets = [[address, port] for address in own_addresses() for port in ports]
    assert await ask(opened, _TCP, targets, 0.5) == []


_LISTEN = """
import os, socket
server = socket.create_server(("0.0.0.0", 9000))
print(socket.gethostbyname(socket.gethostname()), flush=True)
if os.fork() == 0:
    for descriptor in range(3):
        os.close(descriptor)
    while True:
        server.accept()[0].close()
"""


@asynccontextmanager
async def neighbour(host, client):
    """Another sandbox, which listens: itself, and its address."""
    other = await host.sandbox(client)
    other.choose_template("open")
    try:
        result = await other.exec(["python3", "-c", _LISTEN], timeout_s=60)
        yield other, result.stdout.decode().strip()
    finally:
        await other.close()


async def test_a_neighbour_does_not_answer(egress_host, open_client, opened):
    """Red when sandboxes share a bridge, or one bridge is forwarded to another."""
    async with neighbour(egress_host, open_client) as (other, address):
        assert address.startswith("10.253.")
        assert await ask(other, _TCP, [[address, 9000]], 30) == [[address, 9000]]
        assert await ask(opened, _TCP, [[address, 9000]]) == []


async def test_nothing_on_other_networks_reaches_it(egress_host, open_client, far):
    """Red when the second chain lets in more than answers: a route to the sandbox is all that a neighbour would need."""
    async with neighbour(egress_host, open_client) as (_, address):
        far.run("ip", "route", "replace", address, "via", HOST_ADDRESS)
        reach = ["python3", "-c", _TCP, json.dumps([[address, 9000]]), "1"]
        assert json.loads(far.run(*reach)) == []


async def test_names_of_the_machine_are_not_resolved(opened, far):
    """Red when lookups go through the machine's resolver: names within a company or a cloud would be an open book.

    The engine has a resolver in every network of its own, too, and it is asked here by its address.
    """
    local = socket.gethostname()
    assert socket.gethostbyname(local) != ADDRESS
    program = (
        "import socket, struct, sys\n"
        "name = b''.join(bytes([len(p)]) + p.encode() for p in sys.argv[1].split('.')) + b'\\0'\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)\n"
        "s.sendto(struct.pack('>6H', 7, 256, 1, 0, 0, 0) + name + b'\\0\\1\\0\\1', ('127.0.0.11', 53))\n"
        "print(s.recv(500)[-4:].hex())"
    )
    for name in (local, "host.docker.internal", "gateway.docker.internal"):
        result = await opened.exec(["python3", "-c", program, name], timeout_s=60)
        assert result.stdout.decode().strip() in ("", socket.inet_aton(ADDRESS).hex(), "00010001"), (
            name,
            result,
        )
        result = await opened.exec(
            ["python3", "-c", f"import socket; print(socket.gethostbyname('{name}'))"], timeout_s=60
        )
        assert result.stdout.decode().strip() in ("", ADDRESS), "the internet's name server knows all names"


async def test_there_is_no_ipv6(opened):
    """Red when the kernel gives its interface an address: the bridge has one, which is the machine's."""
    result = await opened.exec(
        "cat /proc/net/if_inet6; cat /proc/sys/net/ipv6/conf/eth0/disable_ipv6", timeout_s=60
    )
    assert [line.split()[-1] for line in result.stdout.decode().splitlines()] == ["1"]


async def test_ipv6_is_closed_even_if_it_is_switched_on(egress_host, opened, engine):
    """Red without the rule: root gives the sandbox here what it cannot take itself, and the machine must not answer."""
    await opened.exec("true")
    (container,) = await containers(egress_host)
    async with Engine(engine) as docker:
        found = await docker.call("GET", f"/containers/{container['Id']}/json")
    pid = found["State"]["Pid"]
    (network,) = found["NetworkSettings"]["Networks"].values()
    bridge = next(name for name in firewall.bridges() if network["Gateway"] in address_of(name))
    inside = ["nsenter", "-t", str(pid), "-n"]
    for command in (
        "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6; echo 0 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6",
        "ip -6 addr add fe80::2/64 dev eth0 nodad",
    ):
        subprocess.run(
            [*inside, "unshare", "-m", "sh", "-c", f"mount -t proc proc /proc && {command}"], check=True
        )
    subprocess.run(["sh", "-c", f"echo 0 > /proc/sys/net/ipv6/conf/{bridge}/disable_ipv6"], check=True)
    subprocess.run(["ip", "-6", "addr", "replace", "fe80::1/64", "dev", bridge, "nodad"], check=True)
    async with listener("::", socket.AF_INET6) as port:
        targets = json.dumps([["fe80::1%eth0", port]])
        attack = subprocess.run(
            [*inside, "python3", "-c", _TCP, targets, "1"], capture_output=True, check=True
        )
        assert json.loads(attack.stdout) == []
        heard = subprocess.run(
            [*inside, "ip", "-6", "neigh"], capture_output=True, text=True, check=True
        ).stdout
        assert "lladdr" not in heard, "not even the bridge's neighbour discovery answers"


def address_of(interface):
    return [address.address for address in psutil.net_if_addrs()[interface]]


async def test_it_holds_a_bounded_number_of_connections(opened, far):
    """Red without the limit: one sandbox could fill the table of connections that the whole machine shares."""
    program = (
        "import json, socket, sys, time\nheld, refused = [], 0\n"
        "while len(held) < 300 and refused < 2:\n"
        "  try: held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), 4))\n"
        "  except OSError: refused += 1\nprint(len(held))"
    )
    result = await opened.exec(["python3", "-c", program, ADDRESS, str(far.port)], timeout_s=120)
    assert 200 <= int(result.stdout) <= 256


async def test_its_network_goes_with_it(egress_host, open_client, engine):
    """Red when only the container is removed: the pool would be used up in a day."""
    sandbox = await egress_host.sandbox(open_client)
    sandbox.choose_template("open")
    await sandbox.exec("true")
    assert len(await networks(engine, egress_host)) == 1
    assert firewall.bridges()
    await sandbox.close()

    async def gone():
        return not await networks(engine, egress_host)

    await eventually(gone, what="no network is left")


async def networks(engine, host):
    """Names of the networks of a host."""
    labels = json.dumps({"label": ["sandfleet=1", f"sandfleet.instance={host.instance}"]})
    async with Engine(engine) as docker:
        return [
            network["Name"] for network in await docker.call("GET", "/networks", params={"filters": labels})
        ]


async def test_its_network_stays_when_its_host_is_killed(servers, engine, far, tmp_path):
    """Red when the next host sweeps the network of a sandbox that it adopts, or forgets to remove it in the end."""
    file = tmp_path / "sandfleet.toml"
    file.write_text(FILE)
    database_url = await servers.create_database()
    host = Host(tmp_path / "host", database_url, "docker", engine, {"SANDFLEET_TEMPLATES": str(file)})
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    sandbox.choose_template("open")
    await sandbox.write_file("work", b"half")
    before = await networks(engine, host)
    await host.kill()
    await host.start()
    assert await sandbox.read_file("work") == b"half", "it is adopted"
    assert await ask(sandbox, _TCP, [[ADDRESS, far.port], [METADATA, 80]], 10) == [[ADDRESS, far.port]]
    assert await networks(engine, host) == before
    assert len(before) == 1
    await sandbox.close()
    await client.aclose()
    assert await host.stop() == 0
    await check_empty(host)
    await servers.drop_database(database_url)
