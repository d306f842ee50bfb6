"""A host that is told to stop lets commands end, keeps workspaces, takes nothing new, and ends with 0."""

import asyncio
import signal
from contextlib import aclosing

import psycopg
import pytest

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.shared.errors import HostAway, NoRoom
from sandfleet.shared.store.placements import knows_sandbox
from tests.sandbox.conftest import bucket_env, check_empty, containers
from tests.waiting import eventually


async def row(host):
    async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
        cursor = await connection.execute("select draining from hosts where instance = %s", (host.instance,))
        return await cursor.fetchone()


async def execute(host, statement, *values):
    async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
        cursor = await connection.execute(statement, values)
        return await cursor.fetchall() if cursor.description else []


async def started(host, sandbox, command):
    """A command that has begun."""
    said = []
    task = asyncio.create_task(
        sandbox.exec(command, timeout_s=600, on_output=lambda _, data: said.append(data))
    )
    await eventually(lambda: said or task.done(), what="the command has begun")
    assert not task.done()
    return task


async def test_a_drain_waits_for_commands_and_takes_nothing_new(own_host, servers):
    """Red when a stop kills what runs, hides from placement that the host goes, or loses the files."""
    host = own_host(SANDFLEET_HOST_DRAIN_GRACE_S="600", **await bucket_env(servers))
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    running = await started(
        host, sandbox, "echo on; until [ -e go ]; do sleep 0.1; done; echo done > work; exit 7"
    )
    host.process.send_signal(signal.SIGTERM)

    async def told():
        return await row(host) == (True,)

    await eventually(told, what="PostgreSQL hears of the drain")
    with pytest.raises(NoRoom):
        await client.acquire(await host.signer((await host.sandbox(client)).fence)())
    assert not running.done(), "it runs on"
    await sandbox.write_file("go", b"")
    assert (await running).exit_code == 7
    assert await host.stop() == 0
    assert await row(host) is None
    await check_empty(host)
    await host.start()
    with pytest.raises(SandboxLost, match="its files are again as in the snapshot"):
        await sandbox.exec("true")
    assert await sandbox.read_file("work") == b"done\n"
    await sandbox.close()
    await client.aclose()


async def test_idle_sandboxes_are_kept_and_ended_while_a_command_goes_on(own_host, servers):
    """More than are packed at once; their runs may go on elsewhere at once. Red when all workspaces are kept in the seconds
    after the grace: of many sandboxes some would be lost. Red when what a run's sandbox has left is not known any more: the run
    would be interrupted without keeping it for the one that resumes."""
    host = own_host(
        SANDFLEET_HOST_DRAIN_GRACE_S="600", SANDFLEET_HOST_SAVE_S="0", **await bucket_env(servers)
    )
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        idle = [await host.sandbox(client) for _ in range(5)]
        for sandbox in idle:
            await sandbox.exec("echo kept > work")
            await execute(
                host, "update placements set sandbox_id = 's' where run_id = %s", sandbox.fence.key.run_id
            )
        busy = await host.sandbox(client)
        running = await started(host, busy, "echo on; until [ -e go ]; do sleep 0.1; done; exit 7")
        host.process.send_signal(signal.SIGTERM)

        async def one_is_left():
            return len(await containers(host)) == 1

        await eventually(one_is_left, what="idle sandboxes are ended")
        assert not running.done()
        kept = "select count(*) from snapshots where reason = 'drain' and expires_at > clock_timestamp()"
        assert await execute(host, kept) == [(5,)]

        async def released():
            ended = "select count(*) from placements where sandbox_id = 'ended'"
            return await execute(host, ended) == [(5,)]

        await eventually(released, what="nobody waits for this host")
        async with await psycopg.AsyncConnection.connect(host.database_url) as connection:
            assert await knows_sandbox(connection, idle[0].fence.key)
        with pytest.raises(SandboxLost, match="its host has stopped"):
            await client.list(host.token(idle[0].fence), "/workspace")
        await busy.write_file("go", b"")
        assert (await running).exit_code == 7
        assert await host.stop() == 0
        await check_empty(host)
        await host.start()
        with pytest.raises(SandboxLost, match="its files are again as in the snapshot"):
            await idle[4].exec("true")
        assert await idle[4].read_file("work") == b"kept\n"
        await idle[4].close()


async def test_what_a_run_left_on_a_host_that_went_is_kept_for_who_resumes_it(own_host, servers):
    """Red when a run's first attempt, which was told that its host is away, is taken for one that has had no sandbox: it would be
    interrupted without a word, and the next run begin with nothing."""
    host = own_host(**await bucket_env(servers))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        sandbox = await host.sandbox(client)
        await sandbox.exec("echo kept > work")
        assert await host.stop() == 0
        with pytest.raises(HostAway):
            await sandbox.exec("true")
        await host.start()
        with pytest.raises(SandboxLost, match="its files are again as in the snapshot"):
            await sandbox.snapshot("interrupt")
        kept = await sandbox.snapshot("interrupt")
        assert kept is not None
        assert kept["files"] == 1
        await sandbox.close()


async def test_a_host_keeps_workspaces_for_no_longer_than_it_may(own_host, servers):
    """Red when the time for it cannot be set: a machine that goes in a minute, or one with many large workspaces."""
    host = own_host(SANDFLEET_HOST_SAVE_S="0", **await bucket_env(servers))
    await host.start()
    async with aclosing(SandboxClient(host.socket)) as client:
        await (await host.sandbox(client)).exec("echo lost > work")
    assert await host.stop() == 0
    assert await execute(host, "select 1 from snapshots") == []


@pytest.mark.parametrize("how", ["grace", "second signal"])
async def test_a_command_that_does_not_end_holds_the_stop_no_longer_than_it_may(own_host, how):
    """Red when one command keeps a machine from going, or an operator in a hurry cannot say so."""
    host = own_host(SANDFLEET_HOST_DRAIN_GRACE_S="1" if how == "grace" else "600")
    await host.start()
    client = SandboxClient(host.socket)
    sandbox = await host.sandbox(client)
    running = await started(host, sandbox, "echo on; sleep 601")
    host.process.send_signal(signal.SIGTERM)

    def drains():
        return any(line["message"] == "sandbox host drains" for line in host.logged())

    await eventually(drains, what="the first signal has come")
    if how == "second signal":
        host.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(120):
        assert await host.process.wait() == 0
    await check_empty(host)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.aclose()
