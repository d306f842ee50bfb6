"""An API process's application and a sandbox host on the real engine; no executor, since nothing here is a run."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from sandfleet.functions.api.app import create_app
from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key
from tests.api.conftest import make_settings, serve
from tests.fixtures_servers import TestServers
from tests.sandbox.conftest import bucket_env, check_empty
from tests.sandbox.host_process import Host


@dataclass
class Fleet:
    """A served API and its only host. ``alice`` and ``bob`` are keys of two users of one tenant."""

    url: str
    host: Host
    settings: dict[str, Any]
    alice: str
    bob: str

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        """A plain HTTP client that is authenticated."""
        return httpx.AsyncClient(base_url=self.url, headers={"x-api-key": key or self.alice}, timeout=120)

    async def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement."""
        url = self.host.database_url
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []


TEMPLATES = """
[templates.default]
lifetime_s = 600

[templates.small]
memory = "96MiB"
workspace = "16MiB"
lifetime_s = 120
"""


@asynccontextmanager
async def open_fleet(servers: TestServers, engine: str) -> AsyncIterator[Fleet]:
    """A fleet with a database of its own."""
    database = await servers.create_database()
    folder = Path(tempfile.mkdtemp(prefix="sandboxes-"))
    templates = folder / "sandfleet.toml"
    templates.write_text(TEMPLATES)
    env = {**await bucket_env(servers), "SANDFLEET_TEMPLATES": str(templates)}
    host = Host(folder, database, "docker", engine, env)
    await host.start()
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        alice, bob = [await create_key(connection, Owner("acme", user), "test") for user in ("alice", "bob")]
    settings = {
        "database_url": database,
        "redis_url": servers.next_redis_url(),
        "host_socket": host.socket,
        "host_secret": host.secret,
    }
    async with serve(create_app(make_settings(**settings))) as url:
        yield Fleet(url, host, settings, alice, bob)
    assert await host.stop() == 0
    await servers.drop_database(database)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
async def fleet(servers: TestServers, engine: str) -> AsyncIterator[Fleet]:
    """For all tests that do not stop its host."""
    async with open_fleet(servers, engine) as opened:
        yield opened


@pytest.fixture(autouse=True)
async def none_left(fleet: Fleet) -> AsyncIterator[None]:
    """What a test did not end is ended behind it, and the host removes it."""
    yield
    for key in (fleet.alice, fleet.bob):
        async with fleet.http(key) as http:
            for sandbox in (await http.get("/sandboxes", params={"limit": 100})).json():
                await http.delete(f"/sandboxes/{sandbox['sandbox_id']}")
    await fleet.sql("delete from sandboxes")
    await fleet.sql("delete from placements")
    await check_empty(fleet.host)


@pytest.fixture
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """Alice's plain HTTP client."""
    async with fleet.http() as opened:
        yield opened
