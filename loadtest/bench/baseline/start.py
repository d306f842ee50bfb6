"""Start the baseline beside the system under test: same PostgreSQL and Redis servers, own database and db number."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from arq.constants import default_queue_name, health_check_key_suffix
from redis.asyncio import Redis

from sandfleet.loadtest.bench.children import child, module
from sandfleet.loadtest.bench.http import Connection, Exchange
from sandfleet.loadtest.bench.loop import Target

DATABASE = "sandfleet_bench_baseline"


@asynccontextmanager
async def started(
    *,
    database_url: str,
    redis_url: str,
    redis_db: int,
    provider_url: str,
    agent: Path,
    shared_pids: Mapping[str, int],
    folder: Path,
) -> AsyncIterator[Target]:
    """The running baseline as a target; its database and Redis keys are dropped at the end.

    ``agent`` is the graph as ``path/to/file.py:name``; ``shared_pids`` are the servers that it shares with others
    (PostgreSQL, Redis, provider) and whose CPU time is counted while it is measured; ``folder`` gets the logs.
    Raises RuntimeError if Redis' database ``redis_db`` holds anything.
    """
    own_redis = urlunsplit(urlsplit(redis_url)._replace(path=f"/{redis_db}"))
    redis = Redis.from_url(own_redis)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        if await redis.dbsize():
            raise RuntimeError(f"Redis' database {redis_db} is not empty; name an empty one with --redis-db.")
        stack.push_async_callback(redis.flushdb)
        await stack.enter_async_context(_own_database(database_url))
        port = _free_port()
        base_url = f"http://127.0.0.1:{port}"
        env = {
            "BASELINE_REDIS_URL": own_redis,
            "BASELINE_DATABASE_URL": _with_database(database_url),
            "BASELINE_PORT": str(port),
            "BASELINE_AGENT": str(agent),
            "SANDFLEET_PROVIDER_URL": provider_url,
        }

        async def api_ready() -> bool:
            connection = await Connection.open(base_url, {})
            answer = await connection.ask(Exchange(), "GET", "/ok")
            connection.close()
            return answer.status == 200

        async def worker_ready() -> bool:
            return bool(await redis.exists(default_queue_name + health_check_key_suffix))

        package = "sandfleet.loadtest.bench.baseline"
        api = await stack.enter_async_context(
            child("the baseline's API", module(f"{package}.api"), env, folder / "baseline-api.log", api_ready)
        )
        worker = await stack.enter_async_context(
            child(
                "the baseline's worker",
                module(f"{package}.worker"),
                env,
                folder / "baseline-worker.log",
                worker_ready,
            )
        )
        yield Target(
            name="baseline",
            base_url=base_url,
            headers={},
            pids={"api": api, "worker": worker, **shared_pids},
        )


@asynccontextmanager
async def _own_database(server_url: str) -> AsyncIterator[None]:
    async with await psycopg.AsyncConnection.connect(server_url, autocommit=True) as connection:
        await connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        await connection.execute(f"CREATE DATABASE {DATABASE}")
        try:
            yield
        finally:
            await connection.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


def _with_database(url: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=f"/{DATABASE}"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
