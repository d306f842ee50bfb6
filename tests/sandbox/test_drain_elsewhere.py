"""Runs whose sandbox has ended on a host that stops go on with their files on another one, while the first still waits."""

import signal
import uuid
from contextlib import aclosing, asynccontextmanager

import psycopg
import pytest

from sandfleet.fleet.executor.placement import Placement
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import read_templates
from tests.sandbox.conftest import bucket_env
from tests.waiting import eventually

FILE = """
[templates.idle]
idle_s = 1
"""


async def execute(host, statement, *values):
    async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
        cursor = await connection.execute(statement, values)
        return await cursor.fetchall() if cursor.description else []


@pytest.fixture
async def hosts(own_host, servers, tmp_path):
    """Two that keep snapshots in one bucket; only the first has been started."""
    file = tmp_path / "sandfleet.toml"
    file.write_text(FILE)
    name = uuid.uuid4().hex[:8]
    env = {
        "SANDFLEET_HOST_LISTEN": "127.0.0.1:0",
        "SANDFLEET_HOST_DRAIN_GRACE_S": "600",
        "SANDFLEET_TEMPLATES": str(file),
        **await bucket_env(servers),
    }
    first, second = [own_host("bwrap", SANDFLEET_HOST_ID=f"{each}-{name}", **env) for each in "ab"]
    second.secret = first.secret
    await first.start()
    return first, second


@asynccontextmanager
async def placed(host):
    """Makes sandboxes of runs as an executor on this host's machine has them: of a run and an attempt."""
    config = Settings(
        database_url=host.database_url, host_socket=host.socket, templates=host.env["SANDFLEET_TEMPLATES"]
    )
    async with open_pool(host.database_url, 2) as pool:
        placement = Placement(config, pool, read_templates(config))

        async def make(key, attempt, template="idle"):
            await execute(host, "update runs set attempt = %s where run_id = %s", attempt, key.run_id)
            fence = Fence(key, attempt)
            sandbox = RunSandbox(fence, host.signer(fence), placement)
            sandbox.choose_template(template)
            return sandbox

        yield make
        await placement.aclose()


@asynccontextmanager
async def draining(host):
    """It waits for a command of another run."""
    async with aclosing(SandboxClient(host.socket)) as client:
        busy = await host.sandbox(client)
        async with await busy.attach("read line") as command:
            host.process.send_signal(signal.SIGTERM)

            async def told():
                return await execute(host, "select 1 from hosts where draining") == [(1,)]

            await eventually(told, what="PostgreSQL hears of the drain")
            yield
            await command.send_eof()


@pytest.mark.parametrize("snapshot", ["kept", "deleted"])
async def test_a_sandbox_that_was_ended_before_the_drain_goes_on_elsewhere(hosts, snapshot):
    """Its run hears what it finds there. Red when only those are released that the drain itself ends: the run would hear for as
    long as the host drains that it does not answer. Red when a released run is taken for one that never had a sandbox: without
    the snapshot, its workspace would be empty and nobody would say so."""
    first, second = hosts
    async with placed(first) as make:
        key = await first.new_run()
        sandbox = await make(key, 1)
        await sandbox.exec("echo here > kept")

        async def ended():
            return (await first.health())["sandboxes"] == 0

        await eventually(ended, what="the idle sandbox is ended")
        await second.start()
        async with draining(first):
            if snapshot == "deleted":
                await execute(first, "update snapshots set expires_at = '-infinity'")
            successor = await make(key, 2)
            what = "its files are again as in the snapshot" if snapshot == "kept" else "an empty sandbox"
            with pytest.raises(SandboxLost, match=what):
                await successor.exec("true")
            found = await successor.exec("cat kept")
            assert found.stdout == (b"here\n" if snapshot == "kept" else b"")
            assert (await second.health())["sandboxes"] == 1
            await successor.close()


async def test_what_a_drain_has_kept_is_kept_on_for_who_resumes_the_run(hosts):
    """The same process interrupts the run that had the sandbox. Red when a first attempt without a sandbox is taken for one that
    never had any: the resuming run would find an empty workspace, and nobody would say so."""
    first, second = hosts
    async with placed(first) as make:
        key = await first.new_run()
        sandbox = await make(key, 1, "default")
        await sandbox.exec("echo here > kept")
        async with draining(first):

            async def ended():
                return (await first.health())["sandboxes"] == 1

            await eventually(ended, what="the idle sandbox is ended")
            with pytest.raises(SandboxLost):
                await sandbox.exec("true")
            await second.start()
            for _ in range(2):  # as an executor does
                try:
                    assert await sandbox.snapshot("interrupt") is not None
                    break
                except SandboxLost:
                    continue
            assert await execute(
                first,
                "select 1 from snapshots where run_id = %s and reason = 'interrupt' and expires_at > clock_timestamp()",
                key.run_id,
            )
            await sandbox.close()
