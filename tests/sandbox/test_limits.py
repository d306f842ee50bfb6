"""Limits that other tests do not attack: CPU time, and what the machine keeps of a sandbox on its disk."""

import time

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from tests.sandbox.conftest import containers


async def test_busy_processes_get_no_more_cpu_time_than_the_limit(own_host):
    """Red when CPUs are a weight and no limit. The bound holds on a machine of any speed and load."""
    host = own_host(SANDFLEET_SANDBOX_CPUS="0.3")
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    await sandbox.exec("true")
    (container,) = await containers(host)

    async def used_s():
        once = {"stream": "false", "one-shot": "true"}
        async with Engine(host.docker_host) as engine:
            stats = await engine.call("GET", f"/containers/{container['Id']}/stats", params=once)
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9

    begun, before_s = time.monotonic(), await used_s()
    command = "for i in 1 2 3 4; do timeout 2 sh -c 'while :; do :; done' & done; wait"
    await sandbox.exec(command)
    used, wall = await used_s() - before_s, time.monotonic() - begun
    assert 0 < used <= 0.3 * (wall + 0.2) * 1.1  # the kernel counts in periods of 0.1 s
    await sandbox.close()
    await client.aclose()


async def test_nothing_that_it_writes_is_kept_on_the_machine(docker_host, docker_sandbox):
    """Red with a log driver, a writable layer, or a host that writes down what commands print."""
    await docker_sandbox.exec("true")
    (container,) = await containers(docker_host)
    logged = docker_host.log.stat().st_size
    for where in ("/workspace", "/tmp", "/dev/shm"):
        await docker_sandbox.exec(
            f"yes | head -c 20M | tee {where}/file; cat {where}/file >&2; rm {where}/file"
        )
        await docker_sandbox.exec(
            "head -c 20M /dev/zero > /proc/1/fd/1; head -c 20M /dev/zero > /proc/1/fd/2"
        )
    async with Engine(docker_host.docker_host) as engine:
        found = await engine.call("GET", f"/containers/{container['Id']}/json", params={"size": "true"})
    assert found["LogPath"] == ""
    assert found.get("SizeRw", 0) == 0
    assert docker_host.log.stat().st_size - logged < 100_000
    folder = docker_host.folder / "host"
    kept = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    assert kept < 2_000_000
