"""A sandbox with the policy ``allowlist`` reaches the domains of its list, through the host's proxy, and nothing else."""

import asyncio
import json
import socket

import pytest

from sandfleet.fleet.sandbox.client import SandboxClient
from tests.sandbox.conftest import check_empty
from tests.sandbox.host_process import Host
from tests.sandbox.internet import ADDRESS, HOST_ADDRESS, METADATA, internet

FILE = """
[templates.listed]
network = "allowlist"
domains = ["allowed.example", "*.wild.example"]
"""
NAMES = {
    "allowed.example": ADDRESS,
    "a.wild.example": ADDRESS,
    "metadata.wild.example": METADATA,
    "machine.wild.example": HOST_ADDRESS,
    "private.wild.example": "10.0.0.1",
    "evil.example": ADDRESS,
}
# Fetches argv[1] as any program does, which knows of the proxy by the environment; argv[2] is posted.
_FETCH = """
import sys, urllib.error, urllib.request
body = sys.argv[2].encode() if len(sys.argv) > 2 else None
try:
    print(urllib.request.urlopen(sys.argv[1], body, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("no:", error)
"""
# Opens a tunnel to argv[1] and sends the first message of TLS for argv[2] and argv[3] MiB; prints what comes back.
_TUNNEL = """
import os, socket, ssl, sys, threading
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
try: ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=sys.argv[2]).do_handshake()
except ssl.SSLWantReadError: pass
sent = outgoing.read() + os.urandom(int(sys.argv[3]) << 20)
proxy = socket.create_connection(os.environ["https_proxy"].removeprefix("http://").split(":"), 60)
proxy.sendall(f"CONNECT {sys.argv[1]}:443 HTTP/1.1\\r\\nHost: {sys.argv[1]}\\r\\n\\r\\n".encode())
head = b""
while not head.endswith(b"\\r\\n\\r\\n"): head += proxy.recv(1) or sys.exit(head.decode() or "closed")
def send():
    try: proxy.sendall(sent); proxy.shutdown(socket.SHUT_WR)
    except OSError: pass
sending = threading.Thread(target=send); sending.start()
got = b""
try:
    while data := proxy.recv(65536): got += data
except OSError: pass
sending.join()
greeting, echoed = got[:21], got[21:]
print(head.split(b"\\r\\n")[0].decode(), greeting.decode().strip(), echoed == sent)
"""


@pytest.fixture(scope="module")
async def far():
    async with internet() as made:
        yield made


@pytest.fixture(scope="module", params=["docker", "bwrap"])
async def listed_host(request, servers, engine, far, tmp_path_factory):
    """A host of either backend with the template ``listed``, for which the names are those above."""
    folder = tmp_path_factory.mktemp("listed")
    file = folder / "sandfleet.toml"
    file.write_text(FILE)
    database_url = await servers.create_database()
    host = Host(folder, database_url, request.param, engine, {"SANDFLEET_TEMPLATES": str(file)}, names=NAMES)
    await host.start()
    yield host
    assert await host.stop() == 0
    await check_empty(host)
    await servers.drop_database(database_url)


@pytest.fixture
async def listed(listed_host):
    """A sandbox with the allowlist."""
    client = SandboxClient(listed_host.socket)
    sandbox = await listed_host.sandbox(client)
    sandbox.choose_template("listed")
    yield sandbox
    await sandbox.close()
    await client.aclose()
    await check_empty(listed_host)


async def python(sandbox, program, *arguments):
    result = await sandbox.exec(["python3", "-c", program, *map(str, arguments)], timeout_s=120)
    return (result.stdout or result.stderr).decode()


async def test_programs_reach_a_domain_of_the_list_by_http(listed):
    """Red when programs are not told of the proxy, or nothing joins its port with the host's."""
    said = await python(listed, _FETCH, "http://allowed.example/a?b=c", "the body")
    assert said.startswith("POST /a?b=c HTTP/1.1")
    assert said.rstrip().endswith("the body")


async def test_programs_reach_a_domain_of_the_list_by_tls(listed):
    """Red when the tunnel loses or changes a byte of 3 MiB, in either direction."""
    assert await python(listed, _TUNNEL, "a.wild.example", "a.wild.example", 3) == (
        "HTTP/1.1 200  this is the internet True\n"
    )


async def test_another_name_in_tls_is_refused(listed):
    """Red when the tunnel takes any bytes: another site behind the same address would be within reach."""
    assert "this is the internet" not in await python(listed, _TUNNEL, "allowed.example", "evil.example", 0)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://evil.example/", "403 sandfleet: this sandbox may reach allowed.example, *.wild.example"),
        (f"http://{ADDRESS}/", "403 sandfleet: this sandbox may reach"),
        (f"http://{METADATA}/latest/meta-data/", "403 sandfleet: this sandbox may reach"),
        ("http://metadata.wild.example/", "403 sandfleet: the domain's address is not one of the public"),
        ("http://machine.wild.example/", "403 sandfleet: the domain's address is not one of the public"),
        ("http://private.wild.example/", "403 sandfleet: the domain's address is not one of the public"),
        ("http://unknown.wild.example/", "502 sandfleet: the domain has no address"),
        ("http://allowed.example:6379/", "403 sandfleet: only HTTPS on port 443"),
    ],
)
async def test_everything_else_is_refused_in_words(listed, url, said):
    """Red when the proxy follows a name of the list to wherever its owner points it."""
    assert (await python(listed, _FETCH, url)).startswith(said)


async def test_there_is_no_way_but_the_proxy(listed, far, servers):
    """Red when the policy attaches a network: names, the internet and the machine's servers are out of reach."""
    program = (
        "import json, socket, sys\nreached = [name for _, name in socket.if_nameindex() if name != 'lo']\n"
        "for address, port in json.loads(sys.argv[1]):\n"
        "  try: socket.create_connection((address, port), 2).close(); reached.append([address, port])\n"
        "  except OSError: pass\n"
        "for name in ('allowed.example', 'evil.example', 'localhost.localdomain'):\n"
        "  try: reached.append(socket.gethostbyname(name))\n"
        "  except OSError: pass\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2)\n"
        "for address in (sys.argv[2], '127.0.0.11', '8.8.8.8'):\n"
        "  try: s.sendto(b'\\0' * 12, (address, 53)); reached.append(s.recv(100).hex())\n"
        "  except OSError: pass\nprint(json.dumps(reached))"
    )
    urls = (servers.at.database_url, servers.at.redis_url, servers.at.aws_endpoint_url)
    ports = [int(url.rsplit(":", 1)[1].split("/")[0]) for url in urls]
    targets = [[ADDRESS, far.port], [METADATA, 80], [HOST_ADDRESS, far.port]]
    targets += [["127.0.0.1", port] for port in ports]
    assert json.loads(await python(listed, program, json.dumps(targets), ADDRESS)) == []
    assert far.asked_names() == [], "not even a question leaves"


async def test_a_neighbours_proxy_is_out_of_reach(listed_host, listed):
    """Red when the host's folder of all sandboxes is to be seen inside: sockets of others lie in it."""
    found = await listed.exec("find / -xdev -name '*.sock' 2>/dev/null; cat /proc/net/unix", timeout_s=60)
    assert str(listed_host.folder) not in found.stdout.decode()
    assert (await listed.exec("ls /run/sandfleet", timeout_s=60)).stdout.split().count(b"proxy.sock") == 1


async def test_the_way_stays_when_commands_are_killed(listed):
    """Red when the relay is a process that dies with a command's tree, or by the second rung of the ladder."""
    assert (await listed.exec("kill -9 -1; sleep 300", timeout_s=1)).exit_code != 0
    assert (await python(listed, _FETCH, "http://allowed.example/")).startswith("GET / HTTP/1.1")


async def test_many_connections_at_once_all_get_through(listed, far):
    """Red when the relay or the proxy drops what is more than it takes at once."""
    program = (
        "import concurrent.futures, urllib.request\n"
        "def fetch(n): return urllib.request.urlopen(f'http://allowed.example/{n}', timeout=90).read().split()[1]\n"
        "with concurrent.futures.ThreadPoolExecutor(40) as threads:\n"
        "  print(list(threads.map(fetch, range(150))) == [b'/%d' % n for n in range(150)])"
    )
    assert await python(listed, program) == "True\n"


async def test_a_connection_that_the_client_leaves_ends_at_the_server(listed, far):
    """Red when the relay keeps one half open: the server, and the limit of connections, would be held for ever."""
    program = (
        "import os, socket, sys\n"
        "for _ in range(200):\n"
        "  s = socket.create_connection(('127.0.0.1', 3128), 60)\n"
        "  s.sendall(b'CONNECT allowed.example:443 HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n'); assert s.recv(100); s.close()\n"
        "print('done')"
    )
    assert await python(listed, program) == "done\n"


@pytest.mark.long
async def test_a_client_that_does_not_read_holds_bounded_memory(listed_host, listed):
    """Red when the relay or the proxy reads on while its other side is full."""
    program = (
        "import os, socket\n"
        "s = socket.create_connection(('127.0.0.1', 3128), 60)\n"
        "s.sendall(b'POST http://allowed.example/ HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 200000000\\r\\n\\r\\n')\n"
        "s.settimeout(1)\nsent = 0\n"
        "try:\n  while sent < 200000000: sent += s.send(bytes(65536))\n"
        "except OSError: pass\nprint(sent)"
    )
    before = listed_host.resident_bytes()
    asking = [asyncio.create_task(python(listed, program)) for _ in range(3)]
    await asyncio.gather(*asking)
    assert listed_host.resident_bytes() - before < 64 * 2**20


def test_the_names_of_these_tests_are_the_hosts_alone():
    """Red when the machine itself knows them: then the tests above would prove less."""
    for name in NAMES:
        with pytest.raises(OSError, match=r"."):
            socket.gethostbyname(name)


async def test_the_list_holds_when_the_host_is_killed(servers, engine, far, tmp_path):
    """Red when a sandbox that is adopted has lost its proxy, or has another list."""
    file = tmp_path / "sandfleet.toml"
    file.write_text(FILE)
    database_url = await servers.create_database()
    host = Host(
        tmp_path / "host", database_url, "docker", engine, {"SANDFLEET_TEMPLATES": str(file)}, names=NAMES
    )
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    sandbox.choose_template("listed")
    await sandbox.write_file("work", b"half")
    await host.kill()
    await host.start()
    assert await sandbox.read_file("work") == b"half", "it is adopted"
    assert (await python(sandbox, _FETCH, "http://allowed.example/", "x")).startswith("POST /")
    assert "may reach" in await python(sandbox, _FETCH, "http://evil.example/")
    await sandbox.close()
    await client.aclose()
    assert await host.stop() == 0
    await check_empty(host)
    await servers.drop_database(database_url)
