"""A sandbox reaches nothing, and may do nothing to what holds it."""

import asyncio
import json
import signal
import socket
from contextlib import aclosing

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from tests.sandbox.conftest import containers


async def python(sandbox, program):
    result = await sandbox.exec(["python3", "-c", program])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


async def test_it_has_no_network_but_its_own_loopback(sandbox):
    """Red when a network is attached: its interface shows."""
    program = "import json,socket; print(json.dumps([name for _, name in socket.if_nameindex()]))"
    assert await python(sandbox, program) == ["lo"]


async def test_it_cannot_reach_a_service_of_the_machine(sandbox):
    """Red on the machine's own network: this listener is on every address of it."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        addresses = {"127.0.0.1", "169.254.169.254", "172.17.0.1", socket.gethostbyname(socket.gethostname())}
        program = (
            "import json,socket,sys\nopen_=[]\n"
            f"for address in {sorted(addresses)!r}:\n"
            "  try: socket.create_connection((address, %d), 2).close(); open_.append(address)\n"
            "  except OSError: pass\nprint(json.dumps(open_))" % port
        )
        assert await python(sandbox, program) == []


async def test_it_runs_without_privileges(sandbox):
    program = (
        "import json,os\nstatus=dict(l.rstrip('\\n').split(':\\t',1) for l in open('/proc/self/status') if ':\\t' in l)\n"
        "print(json.dumps([os.getuid(), os.geteuid(), status['CapEff'], status['CapPrm'], status['NoNewPrivs']]))"
    )
    uid, effective, *rest = await python(sandbox, program)
    assert uid == effective != 0
    assert rest == ["0" * 16, "0" * 16, "1"]


async def test_it_can_write_only_where_it_should(sandbox):
    """Red with a writable root, which has no limit."""
    script = "for d in / /etc /usr /usr/bin /run /run/sandfleet /var /dev /proc/sys/kernel; do touch $d/x && echo $d; done"
    result = await sandbox.exec(script)
    assert result.stdout == b""
    assert (await sandbox.exec("touch /workspace/x /tmp/x /dev/shm/x")).exit_code == 0


async def test_it_cannot_speak_to_the_host_in_the_agents_place(sandbox):
    """Red when the host's socket stays open for another connection after the agent's."""
    result = await sandbox.exec("ls /run/sandfleet; python3 -c \"import socket; "
                                "socket.socket(socket.AF_UNIX).connect('/run/sandfleet/agent.sock')\"")  # fmt: skip
    assert b"agent.sock" not in result.stdout
    assert result.exit_code == 1


async def test_it_cannot_end_its_agent(sandbox):
    """Red when the agent handles a signal by ending, as Python does on SIGINT."""
    await sandbox.write_file("kept", b"here")
    await sandbox.exec("for s in $(seq 1 64); do kill -$s 1; done; kill -9 -1", timeout_s=120)
    assert await sandbox.read_file("kept") == b"here"


async def test_it_does_not_see_the_machine(sandbox):
    """Red when the environment or the processes of the host leak in."""
    await sandbox.exec("true")
    environment = (await sandbox.exec("env; cat /proc/1/environ")).stdout
    for secret in (b"SANDFLEET_HOST_SECRET", b"DATABASE_URL", b"SANDFLEET_INSTANCE"):
        assert secret not in environment
    assert len((await sandbox.exec("ls -d /proc/[0-9]*")).stdout.split()) < 5


async def test_two_sandboxes_have_different_users(docker_host, docker_client):
    """Red with one user id for all: inotify, signals and keys are limited per user id on the whole machine."""
    one, other = [await docker_host.sandbox(docker_client) for _ in range(2)]
    found = await asyncio.gather(*(s.exec("id -u; whoami") for s in (one, other)))
    await asyncio.gather(one.close(), other.close())
    assert found[0].stdout != found[1].stdout
    assert all(r.stdout.endswith(b"\nsandbox\n") for r in found)


async def test_the_container_is_hardened(docker_host, docker_sandbox):
    """Red when any of these is left at the engine's default."""
    await docker_sandbox.exec("true")
    (container,) = await containers(docker_host)
    async with Engine(docker_host.docker_host) as engine:
        found = await engine.call("GET", f"/containers/{container['Id']}/json")
    config = found["HostConfig"]
    assert config["NetworkMode"] == "none"
    assert config["ReadonlyRootfs"] is True
    assert config["CapDrop"] == ["ALL"]
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["Privileged"] is False
    assert config["PidsLimit"] == 256
    assert config["Memory"] == config["MemorySwap"] == 512 * 1024 * 1024
    assert config["NanoCpus"] == 1_000_000_000
    assert config["LogConfig"]["Type"] == "none"
    assert not config["Init"]
    assert set(config["Tmpfs"]) == {"/workspace", "/tmp", "/dev/shm"}
    assert all("size=" in o and "nr_inodes=" in o and "nosuid" in o for o in config["Tmpfs"].values())
    assert [mount["RW"] for mount in found["Mounts"] if mount["Type"] == "bind"] == [False] * 5
    labels = found["Config"]["Labels"]
    assert labels["sandfleet"] == "1"
    assert found["Name"].endswith(f"-run-{docker_sandbox.fence.key.run_id}")
    assert labels["sandfleet.instance"] == docker_host.instance


async def test_the_image_has_a_whole_python_and_the_usual_tools(docker_sandbox):
    modules = "ssl sqlite3 ctypes lzma bz2 zlib hashlib decimal asyncio multiprocessing venv unittest xml.etree.ElementTree"
    result = await docker_sandbox.exec(
        ["python3", "-c", f"import {modules.replace(' ', ', ')}; import hashlib; hashlib.sha256(b'x')"]
    )
    assert (result.exit_code, result.stderr) == (0, b"")
    tools = "echo a,b | awk -F, '{print $2}' | sed s/b/c/ | grep c && find / -maxdepth 1 -name usr && bash --version | head -1"
    assert (await docker_sandbox.exec(tools)).stdout.startswith(b"c\n/usr\nGNU bash")


async def test_a_sandbox_is_private_to_its_run(docker_host):
    """Red when anything but the token says whose sandbox is meant."""
    client = SandboxClient(docker_host.socket)
    mine = await docker_host.sandbox(client)
    others = await docker_host.sandbox(client, key=await docker_host.new_run(user_id="bob"))
    await mine.write_file("secret", b"mine")
    assert (await others.list_files())["entries"] == []
    await others.close()
    assert await mine.read_file("secret") == b"mine"
    await mine.close()
    await client.aclose()


async def test_commands_get_signals_as_usual(sandbox):
    """Red when the agent ignores signals itself: what is ignored is inherited.

    Signals 32 and 33 belong to the C library, whose posix_spawn (make's, for one) leaves them ignored.
    """
    ignored = int((await sandbox.exec("grep SigIgn /proc/self/status")).stdout.split()[1], 16)
    assert ignored & ~(0b11 << 31) == 0


async def test_signals_that_the_host_was_started_to_ignore_reach_commands(own_host):
    """Red when the agent leaves them as they are: bwrap hands on what nohup and a shell's background ignore."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        host = own_host("bwrap")
        await host.start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await host.sandbox(client)
        ignored = int((await sandbox.exec("grep SigIgn /proc/self/status")).stdout.split()[1], 16)
        await sandbox.close()
    assert ignored & ~(0b11 << 31) == 0


async def test_programs_are_told_of_the_limits_and_not_of_the_machine(docker_sandbox):
    """Red without the variables (nproc), without the file of CPUs (Python), or without that of memory (free)."""
    counted = await docker_sandbox.exec("nproc; python3 -c 'import os; print(os.cpu_count())'")
    assert counted.stdout == b"1\n1\n"
    memory = await docker_sandbox.exec("free -b | awk '/^Mem/ {print $2, $4}'; ulimit -n")
    assert memory.stdout.split() == [b"536870912", b"536870912", b"4096"]
