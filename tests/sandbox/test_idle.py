"""Sandboxes that nobody uses are ended, with their files kept; those in which something runs are not."""

from contextlib import aclosing

import pytest

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost
from tests.sandbox.conftest import bucket_env
from tests.waiting import eventually

FILE = """
[templates.idle]
idle_s = 1.5
"""


@pytest.fixture
async def host(own_host, servers, tmp_path):
    """A host that keeps snapshots, and has a template whose sandboxes end when they are idle."""
    path = tmp_path / "sandfleet.toml"
    path.write_text(FILE)
    made = own_host(SANDFLEET_TEMPLATES=str(path), **await bucket_env(servers))
    await made.start()
    return made


async def idle_sandbox(host, client):
    sandbox = await host.sandbox(client)
    sandbox.choose_template("idle")
    return sandbox


async def there(host):
    return (await host.health())["sandboxes"]


async def test_one_that_nobody_uses_is_ended_and_its_files_come_back(host):
    """Red when only its lifetime ends a sandbox, or when its files go with it."""
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await idle_sandbox(host, client)
        await sandbox.write_file("kept", b"here")

        async def gone():
            return await there(host) == 0

        await eventually(gone, what="the idle sandbox is gone")
        with pytest.raises(SandboxLost, match=r"nobody had used it\. .*as in the snapshot"):
            await sandbox.exec("true")
        assert await sandbox.read_file("kept") == b"here"
        await sandbox.close()


async def test_those_in_which_something_runs_are_not_ended(host):
    """Red when only calls count as use, or only processes that the agent was asked for. Neighbours that are idle for as long
    are ended meanwhile, two one after the other."""
    async with aclosing(SandboxClient(host.socket)) as client:
        used = [await idle_sandbox(host, client) for _ in range(3)]
        await used[1].processes.start("sleep 600")
        await used[2].exec("sleep 600 &")

        async def only_the_used():
            return await there(host) == 3

        async with await used[0].attach("read line"):
            for _ in range(2):
                neighbour = await idle_sandbox(host, client)
                await neighbour.exec("true")
                await eventually(only_the_used, what="the idle neighbour is gone")
        for sandbox in used:
            assert (await sandbox.exec("echo on")).stdout == b"on\n"
            await sandbox.close()
