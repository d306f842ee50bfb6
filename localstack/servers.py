"""PostgreSQL, Redis, SQS and S3 for local use: embedded, or the user's own where the environment names them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psycopg
from psycopg import sql

from sandfleet.localstack.bucket import create_bucket
from sandfleet.localstack.ministack import start_ministack
from sandfleet.localstack.parallel import parallel
from sandfleet.localstack.postgres import start_postgres
from sandfleet.localstack.queues import create_queues
from sandfleet.localstack.redis_server import start_redis
from sandfleet.localstack.supervisor import Supervisor

POOLS = ("default", "hosts")
DATABASE = "sandfleet"


@dataclass(frozen=True)
class Servers:
    """Where the three servers are. ``admin_url`` may create databases; None if the database is the user's own."""

    database_url: str
    admin_url: str | None
    redis_url: str
    aws_endpoint_url: str
    aws_region: str
    queue_urls: dict[str, str]
    snapshot_bucket: str


async def start_servers(
    supervisor: Supervisor, env: Mapping[str, str] | None = None, say: Callable[[str], None] = lambda _: None
) -> Servers:
    """Start side by side the servers that ``DATABASE_URL``, ``REDIS_URL`` and ``AWS_ENDPOINT_URL`` do not name.

    ``env`` is the environment to read those from (default: this process's own).
    """
    given = os.environ if env is None else env
    name = f"sandfleet-{supervisor.instance}"
    region = given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION") or "us-east-1"

    async def sqs() -> tuple[str, dict[str, str]]:
        urls: dict[str, str] = {}

        async def make_queues_and_bucket(endpoint: str) -> None:
            urls.update(await create_queues(endpoint, region, dict(given), POOLS, name))
            await create_bucket(endpoint, region, dict(given), name)

        endpoint = given.get("AWS_ENDPOINT_URL")
        if endpoint:
            await make_queues_and_bucket(endpoint)
        else:
            endpoint = await start_ministack(supervisor, region, make_queues_and_bucket)
        say("SQS and S3 are ready")
        return endpoint, urls

    (url, admin_url), redis_url, (endpoint, urls) = await parallel(
        database_server(supervisor, given, say), redis_server(supervisor, given, say), sqs()
    )
    return Servers(url, admin_url, redis_url, endpoint, region, urls, name)


async def database_server(
    supervisor: Supervisor, env: Mapping[str, str], say: Callable[[str], None] = lambda _: None
) -> tuple[str, str | None]:
    """The database that ``DATABASE_URL`` names and None, or one of a server started here and the URL of its administrator."""
    if url := env.get("DATABASE_URL"):
        return url, None
    admin_url = await start_postgres(supervisor)
    async with await psycopg.AsyncConnection.connect(admin_url, autocommit=True) as connection:
        found = await connection.execute("select 1 from pg_database where datname = %s", (DATABASE,))
        if await found.fetchone() is None:
            await connection.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))
    say("PostgreSQL is ready")
    return database_url(admin_url, DATABASE), admin_url


async def redis_server(
    supervisor: Supervisor, env: Mapping[str, str], say: Callable[[str], None] = lambda _: None
) -> str:
    """The URL that ``REDIS_URL`` names, or that of a server started here."""
    if url := env.get("REDIS_URL"):
        return url
    url = await start_redis(supervisor)
    say("Redis is ready")
    return url


def database_url(url: str, name: str) -> str:
    """The URL of another database on the same server."""
    base, _, query = url.partition("?")
    return base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")
