"""Sandboxes are made from the template that their run was given."""

from contextlib import asynccontextmanager

import pytest

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.shared.errors import SandboxError

FILE = """
[templates.small]
memory = "128MiB"
workspace = "16MiB"
pids = 32
cpus = 0.5
open_files = 64
inodes = 16
output = 2000
command_timeout_s = 0.2
[templates.small.env]
GREETING = "hello there"
"""


@asynccontextmanager
async def client_of(host):
    """Start the host, and a client of it."""
    await host.start()
    client = SandboxClient(host.socket)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sandfleet.toml"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize("backend", ["docker", "bwrap"])
async def test_a_run_gets_the_limits_and_variables_of_its_template(own_host, file, backend):
    """Red when the host makes every sandbox from the default template."""
    host = own_host(backend, SANDFLEET_TEMPLATES=file)
    async with client_of(host) as client:
        for template, size, greeting in (("small", 16, b"hello there"), ("default", 256, b"")):
            sandbox = await host.sandbox(client)
            sandbox.choose_template(template)
            script = 'df -k /workspace | tail -1 | { read _ k _; echo $k; }; printf "%s" "$GREETING"'
            result = await sandbox.exec(script, timeout_s=60)
            assert result.stdout == b"%d\n%s" % (size * 1024, greeting)
            await sandbox.close()


async def test_every_limit_of_a_template_holds(own_host, file):
    """Red for each limit that is taken from the settings instead."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    async with client_of(host) as client:
        sandbox = await host.sandbox(client)
        sandbox.choose_template("small")
        script = "free -m | awk '/Mem/ {print $2}'; ulimit -n; nproc; df -i /workspace | awk 'END {print $2}'; cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2>/dev/null"
        result = await sandbox.exec(script, timeout_s=60)
        assert result.stdout.split() == [b"128", b"64", b"1", b"16", b"32"]
        assert (await sandbox.exec("sleep 300")).timed_out, "the template's time limit"
        assert (await sandbox.exec("yes | head -c 100000", timeout_s=60)).dropped_bytes >= 90_000
        await sandbox.close()


async def test_the_template_is_chosen_before_the_first_use(own_host, file):
    """Red when a choice that comes too late is ignored: the graph would think that it has another sandbox."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    async with client_of(host) as client:
        sandbox = await host.sandbox(client)
        await sandbox.exec("true")
        sandbox.choose_template("default")
        with pytest.raises(SandboxError, match="before its first use"):
            sandbox.choose_template("small")
        await sandbox.close()


async def test_a_run_keeps_its_sandbox_when_a_later_attempt_has_another_template(own_host, file):
    """Red when a deploy in the midst of a run takes its files away."""
    host = own_host(SANDFLEET_TEMPLATES=file)
    async with client_of(host) as client:
        first = await host.sandbox(client)
        await first.write_file("/workspace/kept", b"mine")
        second = await host.sandbox(client, key=first.fence.key, attempt=2)
        second.choose_template("small")
        assert await second.read_file("/workspace/kept") == b"mine"
        await second.close()


async def test_a_template_that_the_host_does_not_know_is_refused(own_host):
    host = own_host()
    async with client_of(host) as client:
        sandbox = await host.sandbox(client)
        sandbox.choose_template("no-such")
        with pytest.raises(TemplateUnavailable, match="no template 'no-such', only default"):
            await sandbox.exec("true")
