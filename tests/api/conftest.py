"""An API process's application on real servers, callers with keys, and an executor that only says what it is told."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
import uvicorn
from fastapi import FastAPI
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from redis.asyncio import Redis

from sandfleet.functions.api.app import create_app
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.api_keys import create_key
from tests.api.executor import Executor

GRAPHS = ("chat", "other")
SCHEMAS = {"input_schema": {"type": "object"}, "output_schema": None, "state_schema": {"type": "object"}}
DRAWINGS = {
    "0": {"nodes": [{"id": "a", "type": "runnable", "data": {}}], "edges": []},
    "1": {"nodes": [{"id": "nested:a", "type": "runnable", "data": {}}], "edges": []},
}


@dataclass
class Api:
    """A served API. ``alice`` and ``bob`` are keys of two users of one tenant, ``eve`` is another tenant's."""

    url: str
    app: FastAPI
    database_url: str
    redis_url: str
    alice: str
    bob: str
    eve: str
    executor: Executor

    def client(self, key: str | None = None) -> LangGraphClient:
        """An unmodified SDK client."""
        return get_client(url=self.url, api_key=key or self.alice)

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        """A plain HTTP client that is authenticated."""
        return httpx.AsyncClient(base_url=self.url, headers={"x-api-key": key or self.alice}, timeout=30)

    async def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of a statement."""
        async with await psycopg.AsyncConnection.connect(self.database_url, autocommit=True) as connection:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    def key_of(self, run_id: str) -> RunKey:
        """The full key of a run of alice's."""
        return RunKey("acme", "alice", UUID(run_id))


@asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """The application behind a real server on a free port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", http="httptools"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.state.resources.closing.set()
        server.should_exit = True
        await serving


def make_settings(database_url: str, redis_url: str, **changes: Any) -> Settings:
    """Settings for tests: short pauses, no queues."""
    return Settings(
        **{
            "database_url": database_url,
            "redis_url": redis_url,
            "operation_timeout_s": 1.0,
            "disconnect_grace_s": 0.3,
            "sse_heartbeat_s": 0.2,
            **changes,
        }
    )


@pytest.fixture(scope="module")
async def api(database: str, redis_url: str) -> AsyncIterator[Api]:
    """A served API with two graphs and three callers, for one module."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        alice, bob, eve = [
            await create_key(connection, owner, "test")
            for owner in (Owner("acme", "alice"), Owner("acme", "bob"), Owner("evil", "eve"))
        ]
        for graph in GRAPHS:
            await connection.execute(
                "insert into graphs (graph_id, pool, schemas, drawings) values (%s, 'default', %s, %s)",
                (graph, json.dumps(SCHEMAS), json.dumps(DRAWINGS)),
            )
            await connection.execute(
                "insert into assistants (tenant, user_id, assistant_id, graph_id, name, metadata)"
                " values ('', '', %s, %s, %s, '{\"created_by\": \"system\"}')",
                (graph_assistant_id(graph), graph, graph),
            )
    app = create_app(make_settings(database, redis_url))
    redis = Redis.from_url(redis_url)
    executor = await Executor.open(database, redis)
    async with serve(app) as url:
        yield Api(url, app, database, redis_url, alice, bob, eve, executor)
    await executor.aclose()
    await redis.aclose()


@pytest.fixture(autouse=True)
async def no_runs_left(api: Api) -> AsyncIterator[None]:
    """Runs that a test did not end are ended behind it, so that the next one claims its own."""
    yield
    await api.sql(
        """select end_run(tenant, user_id, run_id, 'interrupted', null, 60) from (
             select * from runs where status in ('pending', 'running') order by gate is null, seq desc) r"""
    )


@pytest.fixture
async def client(api: Api) -> AsyncIterator[LangGraphClient]:
    """Alice's SDK client."""
    async with api.client() as opened:
        yield opened


@pytest.fixture
async def http(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    """Alice's plain HTTP client."""
    async with api.http() as opened:
        yield opened
