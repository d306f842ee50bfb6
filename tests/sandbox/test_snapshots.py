"""Workspaces that are kept, and come back after what would have lost them."""

import uuid
from contextlib import aclosing, asynccontextmanager

import psycopg
import pytest
import zstandard

from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import SandboxLost, SnapshotFailed
from sandfleet.localstack.aws_client import aws_client
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.snapshots import note_lost
from tests.sandbox.conftest import bucket_env, containers
from tests.sandbox.host_process import INSERT_RUN

FILL = "mkdir -p deep; echo kept > deep/file; chmod 750 deep; ln -s deep/file link"
LOOK = "cat link; stat -c %a deep; ls"


@pytest.fixture
async def keeping_host(own_host, servers):
    """A host that the test may stop and that keeps snapshots."""
    host = own_host(**await bucket_env(servers))
    await host.start()
    return host


@asynccontextmanager
async def connected(host):
    async with aclosing(SandboxClient(host.socket)) as client:
        yield client


async def execute(host, statement, *values):
    async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
        cursor = await connection.execute(statement, values)
        return await cursor.fetchall() if cursor.description else []


async def remove_containers(host):
    """What happens to a machine that is lost: nothing of it can be adopted."""
    async with Engine(host.docker_host) as engine:
        for container in await containers(host):
            await engine.remove_container(container["Id"])


async def objects(host):
    async with aws_client("s3", host.env["AWS_ENDPOINT_URL"], "us-east-1", {}) as s3:
        listed = await s3.list_objects_v2(Bucket=host.env["SANDFLEET_SNAPSHOT_BUCKET"])
        return [each["Key"] for each in listed.get("Contents", [])]


async def test_a_snapshot_tells_what_it_holds(sandbox):
    """Red when counts and sizes are made up; the program that packs is looked at in test_archive.py."""
    await sandbox.exec(FILL)
    taken = await sandbox.snapshot()
    assert (taken["files"], taken["content_bytes"], taken["skipped"], taken["reason"]) == (1, 5, 0, "request")
    assert 0 < taken["bytes"] < 1000


async def test_a_workspace_outlives_the_stop_of_its_host(keeping_host):
    """Red when a host that stops does not keep its workspaces, or the next does not say that processes are gone."""
    async with connected(keeping_host) as client:
        sandbox = await keeping_host.sandbox(client)
        await sandbox.exec(FILL)
        await sandbox.processes.start("sleep 300")
    await keeping_host.stop()
    await keeping_host.start()
    async with connected(keeping_host) as client:
        successor = await keeping_host.sandbox(client, key=sandbox.fence.key, attempt=2)
        with pytest.raises(SandboxLost, match=r"has stopped.*files are again as in the snapshot"):
            await successor.exec("true")
        assert (await successor.exec(LOOK)).stdout == b"kept\n750\ndeep\nlink\n"


async def test_who_used_the_lost_sandbox_hears_at_once_what_came_back(keeping_host):
    """Red when the loss is told before the next sandbox is made: it could not name the snapshot."""
    async with connected(keeping_host) as client:
        sandbox = await keeping_host.sandbox(client)
        await sandbox.exec(FILL)
        taken = await sandbox.snapshot()
        await sandbox.exec("echo later > deep/file")
        await keeping_host.kill()
        await remove_containers(keeping_host)
        await keeping_host.start()
        with pytest.raises(SandboxLost, match=f"snapshot {taken['snapshot_id']}"):
            await sandbox.exec("true")
        assert (await sandbox.exec("cat link")).stdout == b"kept\n"


async def test_without_a_snapshot_the_loss_says_that_all_is_gone(own_host):
    """Red when a lost workspace is replaced by an empty one in silence."""
    host = own_host()
    await host.start()
    async with connected(host) as client:
        sandbox = await host.sandbox(client)
        await sandbox.exec(FILL)
        with pytest.raises(SnapshotFailed, match="SANDFLEET_SNAPSHOT_BUCKET"):
            await sandbox.snapshot()
        await host.stop()
        await host.start()
        with pytest.raises(SandboxLost, match="finds an empty sandbox"):
            await sandbox.exec("true")
        assert (await sandbox.exec("ls")).stdout == b""


async def test_a_run_that_resumes_finds_the_files_of_the_interrupted_one(docker_host, docker_client):
    """Red when the thread's snapshot is looked up by run only; a run that does not resume begins empty, though."""
    sandbox = await docker_host.sandbox(docker_client)
    await sandbox.exec(FILL)
    await sandbox.snapshot("interrupt")
    await sandbox.close()
    (thread,) = await execute(
        docker_host, "select thread_id from runs where run_id = %s", sandbox.fence.key.run_id
    )
    for kwargs, found in (('{"command": {"resume": 1}, "input": null}', b"kept\n"), ('{"input": {}}', b"")):
        key = await docker_host.new_run()
        await execute(
            docker_host,
            "update runs set thread_id = %s, kwargs = %s where run_id = %s",
            *thread,
            kwargs,
            key.run_id,
        )
        successor = await docker_host.sandbox(docker_client, key=key)
        assert (await successor.exec("cat link 2>/dev/null")).stdout == found
        await successor.close()


async def test_a_loss_is_told_to_whoever_resumes_until_a_workspace_was_kept_again(docker_host, docker_client):
    """Red when a run that brings input, or one that finds everything, is told of a loss; or it is told by a run that had no host,
    or by an attempt that was superseded."""
    thread, owner = uuid.uuid4(), ("acme", "ada")
    await execute(
        docker_host, "insert into threads (tenant, user_id, thread_id) values (%s, %s, %s)", *owner, thread
    )

    async def run(kwargs='{"command": {"resume": 1}, "input": null}'):
        key = await docker_host.new_run()
        statement = "update runs set thread_id = %s, kwargs = %s, attempt = 1 where run_id = %s"
        await execute(docker_host, statement, thread, kwargs, key.run_id)
        return key

    async def note(key, attempt=1):
        async with await psycopg.AsyncConnection.connect(
            docker_host.database_url, autocommit=True
        ) as connection:
            await note_lost(connection, Fence(key, attempt), "Not kept.")

    async def told(key):
        sandbox = await docker_host.sandbox(docker_client, key=key)
        try:
            await sandbox.exec("true")
        except SandboxLost as lost:
            return lost.message.startswith(
                "Not kept. Its files and processes are gone; the next use finds an empty"
            )
        finally:
            await sandbox.close()
        return False

    without_host = await run()
    await note(without_host)
    assert not await told(await run())
    interrupted = await run()
    sandbox = await docker_host.sandbox(docker_client, key=interrupted)
    await sandbox.exec("true")
    await note(interrupted, attempt=0)
    assert not await told(await run())
    await note(interrupted)
    assert await told(await run())
    assert not await told(await run('{"input": {}}'))
    assert await told(await run())  # the one before may not have used its sandbox
    await sandbox.snapshot("interrupt")
    await sandbox.close()
    assert not await told(await run())
    await execute(docker_host, "delete from threads where thread_id = %s", thread)
    assert await execute(docker_host, "select 1 from lost_workspaces where thread_id = %s", thread) == []


async def test_another_user_never_gets_the_files(docker_host, docker_client):
    """Red when snapshots are looked up without their owner."""
    sandbox = await docker_host.sandbox(docker_client)
    await sandbox.exec(FILL)
    await sandbox.snapshot()
    await sandbox.close()
    stranger = sandbox.fence.key._replace(user_id="eve")
    await execute(docker_host, INSERT_RUN, *stranger, uuid.uuid4(), uuid.uuid4())
    theirs = await docker_host.sandbox(docker_client, key=stranger)
    assert (await theirs.exec("ls")).stdout == b""
    await theirs.close()


async def test_a_workspace_too_large_for_a_snapshot_is_refused_and_stays(own_host, servers):
    """Red without the limit: the host's disk and the bucket would take whatever a sandbox makes."""
    host = own_host(**await bucket_env(servers), SANDFLEET_SNAPSHOT_BYTES="100000")
    await host.start()
    async with connected(host) as client:
        sandbox = await host.sandbox(client)
        await sandbox.exec("head -c 1000000 /dev/urandom > noise")
        with pytest.raises(SnapshotFailed, match="does not fit"):
            await sandbox.snapshot()
        assert (await sandbox.exec("stat -c %s noise")).stdout == b"1000000\n"
    assert await objects(host) == []


async def damage_all(host, damage):
    """Put ``damage(content)`` in the place of all archives; None removes them."""
    async with aws_client("s3", host.env["AWS_ENDPOINT_URL"], "us-east-1", {}) as s3:
        for key in await objects(host):
            bucket = host.env["SANDFLEET_SNAPSHOT_BUCKET"]
            if damage is None:
                await s3.delete_object(Bucket=bucket, Key=key)
            else:
                found = await s3.get_object(Bucket=bucket, Key=key)
                await s3.put_object(Bucket=bucket, Key=key, Body=damage(await found["Body"].read()))


DAMAGED = {
    "gone": None,
    "no archive": lambda _: b"neither zstd nor tar",
    "cut off": lambda archive: archive[:-4],
    "no tar": lambda _: zstandard.compress(b"x" * 1000),
    "incomplete": lambda _: zstandard.compress(bytes(10240)),  # a tar without files
}


@pytest.mark.parametrize("damage", DAMAGED)
async def test_a_damaged_snapshot_is_told_and_given_up(keeping_host, damage):
    """Red when the run goes on with half of its files, or without any, in silence; and when it can never have a sandbox
    again."""
    async with connected(keeping_host) as client:
        sandbox = await keeping_host.sandbox(client)
        await sandbox.exec(FILL)
        await sandbox.snapshot()
        await sandbox.close()
        await damage_all(keeping_host, DAMAGED[damage])
        successor = await keeping_host.sandbox(client, key=sandbox.fence.key, attempt=2)
        with pytest.raises(SnapshotFailed, match="is given up, and the next use finds an empty sandbox"):
            await successor.exec("true")
        assert (await successor.exec("ls")).stdout == b""


async def test_interrupted_runs_of_a_thread_keep_one_snapshot_between_them(docker_host, docker_client):
    """Red when each turn of a conversation leaves an archive behind for a week."""
    thread = uuid.uuid4()
    keys = [await docker_host.new_run() for _ in range(2)]
    for key in keys:
        await execute(docker_host, "update runs set thread_id = %s where run_id = %s", thread, key.run_id)
        sandbox = await docker_host.sandbox(docker_client, key=key)
        await sandbox.exec("true")
        await sandbox.snapshot("interrupt")
        await sandbox.close()
    kept = "select run_id from snapshots where thread_id = %s and expires_at > clock_timestamp()"
    assert await execute(docker_host, kept, thread) == [(keys[1].run_id,)]


async def test_expired_snapshots_are_removed_with_their_archives(keeping_host):
    """Red when a row goes before its archive, or those that replace one another are all kept."""
    async with connected(keeping_host) as client:
        sandbox = await keeping_host.sandbox(client)
        await sandbox.exec(FILL)
        await sandbox.snapshot()
        await sandbox.snapshot("interrupt")
        newest = await sandbox.snapshot("interrupt")
    assert len(await objects(keeping_host)) == 3
    env = keeping_host.env
    settings = Settings(
        database_url=keeping_host.database_url,
        aws_endpoint_url=env["AWS_ENDPOINT_URL"],
        snapshot_bucket=env["SANDFLEET_SNAPSHOT_BUCKET"],
    )
    sweeper = Snapshots(settings, keeping_host.folder / "sweep", "a host")
    assert await sweeper.remove_expired() == 1
    await sweeper.aclose()
    assert len(await objects(keeping_host)) == 2
    kept = await execute(keeping_host, "select snapshot_id::text from snapshots order by created_at")
    assert kept[-1] == (newest["snapshot_id"],)


async def test_a_snapshot_whose_record_was_not_confirmed_is_there(own_host, servers, tmp_path):
    """Red when its archive is removed since the database's answer was lost: later it would be found to be damaged."""
    (tmp_path / "snapshot.recorded").write_text("lose")
    host = own_host(**await bucket_env(servers), SANDFLEET_FAULT_POINTS=str(tmp_path))
    await host.start()
    async with connected(host) as client:
        sandbox = await host.sandbox(client)
        await sandbox.exec(FILL)
        taken = await sandbox.snapshot()
        assert not (tmp_path / "snapshot.recorded").exists()
        assert len(await objects(host)) == 1
        await sandbox.close()
        successor = await host.sandbox(client, key=sandbox.fence.key, attempt=2)
        with pytest.raises(SandboxLost, match=f"snapshot {taken['snapshot_id']}"):
            await successor.exec("true")
        await successor.close()


async def test_a_fence_of_the_past_takes_no_snapshot(docker_host, docker_client):
    """Red when the route does not look at the attempt."""
    sandbox = await docker_host.sandbox(docker_client)
    await sandbox.exec("true")
    successor = await docker_host.sandbox(docker_client, key=sandbox.fence.key, attempt=2)
    await successor.exec("true")
    with pytest.raises(Exception, match="later attempt"):
        await sandbox.snapshot()
    assert successor.fence == Fence(sandbox.fence.key, 2)
    await successor.close()
