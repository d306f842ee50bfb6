"""Real PostgreSQL, Redis and SQS for tests, and a database, a Redis database and queues per module."""

import itertools
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
import redis.asyncio
from psycopg import sql

from sandfleet.localstack.queues import create_queues
from sandfleet.localstack.servers import POOLS, Servers, database_url, start_servers
from sandfleet.localstack.supervisor import AlreadyRunning, Supervisor
from sandfleet.shared.db.migrate import upgrade
from tests.localstack_emulator import start_localstack

ROOT = Path(__file__).parent.parent / ".sandfleet" / "test"
TEMPLATE = "sandfleet_template"


@dataclass
class TestServers:
    """The servers of a test session. Each `database` is new, migrated, and made in some 50 ms."""

    __test__ = False

    supervisor: Supervisor
    at: Servers
    redis_databases: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    @property
    def admin_url(self) -> str:
        assert self.at.admin_url is not None
        return self.at.admin_url

    @property
    def aws_endpoint_url(self) -> str:
        return self.at.aws_endpoint_url

    async def create_database(self) -> str:
        """URL of a new database with the newest schema."""
        name = f"test_{uuid.uuid4().hex}"
        await self._execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(TEMPLATE))
        )
        url = database_url(self.admin_url, name)
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await connection.execute("update deployment set deployment_id = gen_random_uuid()")
        return url

    async def drop_database(self, url: str) -> None:
        """Drop a database and end whoever is connected to it."""
        name = url.rsplit("/", 1)[1]
        await self._execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    async def create_template(self) -> None:
        """Make the migrated template anew, and drop what an earlier session left."""
        async with await psycopg.AsyncConnection.connect(self.admin_url, autocommit=True) as connection:
            rows = await connection.execute(
                "select datname from pg_database where datname ~ '^test_' or datname = %s", (TEMPLATE,)
            )
            for (name,) in await rows.fetchall():
                await connection.execute(
                    sql.SQL("drop database {} with (force)").format(sql.Identifier(name))
                )
            await connection.execute(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
        upgrade(database_url(self.admin_url, TEMPLATE))

    def next_redis_url(self) -> str:
        """URL of a Redis database that nobody used yet."""
        return self.at.redis_url.rsplit("/", 1)[0] + f"/{next(self.redis_databases)}"

    async def create_queues(self) -> dict[str, str]:
        """Queue URL per pool of newly made queues."""
        prefix = f"test-{uuid.uuid4().hex[:12]}"
        return await create_queues(self.aws_endpoint_url, self.at.aws_region, {}, POOLS, prefix)

    async def _execute(self, statement: sql.Composed) -> None:
        async with await psycopg.AsyncConnection.connect(self.admin_url, autocommit=True) as connection:
            await connection.execute(statement)


async def open_supervisor(kind: str) -> Supervisor:
    """A supervisor with a folder of its own, also when several test sessions run in one checkout."""
    for number in itertools.count(1):
        supervisor = Supervisor(ROOT / f"{kind}-{number}")
        try:
            await supervisor.open()
        except AlreadyRunning:
            continue
        return supervisor
    raise AssertionError("unreachable")


@pytest.fixture(scope="session")
async def servers(pytestconfig: pytest.Config) -> AsyncIterator[TestServers]:
    """Embedded PostgreSQL, Redis and MiniStack, or the emulator that was asked for, started once for the session."""
    supervisor = await open_supervisor("servers")
    try:
        env = {}
        if pytestconfig.getoption("emulator") == "localstack":
            env["AWS_ENDPOINT_URL"] = await start_localstack(supervisor)
        started = TestServers(supervisor, await start_servers(supervisor, env))
        await started.create_template()
        yield started
    finally:
        await supervisor.close()


@pytest.fixture(scope="module")
async def database(servers: TestServers) -> AsyncIterator[str]:
    """URL of a migrated database for one module, dropped afterwards."""
    url = await servers.create_database()
    yield url
    await servers.drop_database(url)


@pytest.fixture(scope="module")
async def redis_url(servers: TestServers) -> AsyncIterator[str]:
    """URL of an empty Redis database for one module, emptied afterwards."""
    url = servers.next_redis_url()
    yield url
    client = redis.asyncio.Redis.from_url(url)
    await client.flushdb()
    await client.aclose()


@pytest.fixture(scope="module")
async def queue_urls(servers: TestServers) -> dict[str, str]:
    """SQS queue URL per pool, new for one module."""
    return await servers.create_queues()
