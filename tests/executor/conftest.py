"""Executions of runs in this process, with writer, publisher and database as they are."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langgraph.pregel import Pregel

from sandfleet.fleet.executor import sync_durability, whole_steps
from sandfleet.fleet.executor.execution import Execution, Services
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks
from sandfleet.fleet.executor.metrics import ExecutorMetrics
from sandfleet.fleet.executor.placement import Placement
from sandfleet.fleet.executor.publisher import Publisher
from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.claims import ClaimedRun, claim
from sandfleet.shared.templates import read_templates
from tests.streams.world import World, open_world


class Given:
    """A graph as a project gives it."""

    def __init__(self, graph: Pregel[Any, Any, Any, Any]) -> None:
        self._graph = graph

    @asynccontextmanager
    async def open(self, config: Any) -> AsyncIterator[Pregel[Any, Any, Any, Any]]:
        yield self._graph


class Executor:
    """Claims runs and makes their executions. The writer and the publisher may be replaced."""

    def __init__(self, world: World, socket: Path) -> None:
        self.world = world
        self.writer: FencedWriter = world.writer
        self.publisher: Publisher = world.publisher
        settings = world.settings.model_copy(update={"host_socket": socket})
        self.placement = Placement(settings, world.pool, read_templates(settings))
        self._beginning = asyncio.Lock()

    async def claim(
        self, graph: Any, *, attempt: int = 1, thread_id: UUID | None = None, **kwargs: Any
    ) -> Execution:
        """A new run of ``graph``, claimed for its ``attempt``, on a new thread unless one is named."""
        key = await self.world.run(thread_id)
        async with self.world.pool.connection() as connection:
            await connection.execute(
                "update runs set attempt = %s where run_id = %s", (attempt - 1, key.run_id)
            )
            (run,) = await claim(connection, "default", "me", 3600, 1, longest_waiting=False)
        return self._execution(graph, replace(run, kwargs={"input": {}, **kwargs}))

    async def claim_again(self, lost: Execution, graph: Any) -> Execution:
        """The next attempt of a run that an execution has given up."""
        async with self.world.pool.connection() as connection:
            await connection.execute(
                "update runs set status = 'pending' where run_id = %s", (lost.run.fence.key.run_id,)
            )
            (run,) = await claim(connection, "default", "me", 3600, 1, longest_waiting=False)
        return self._execution(graph, replace(run, kwargs=lost.run.kwargs))

    def _execution(self, graph: Any, run: ClaimedRun) -> Execution:
        services = Services(
            self.world.settings.model_copy(update={"host_secret": "of these tests"}),
            {run.graph_id: Given(graph)},  # type: ignore[dict-item]
            self.world.pool,
            Finisher(self.world.pool),
            self.writer,
            self.publisher,
            self.placement,
            LedgerLinks(self.world.database_url, self.writer, self.world.pool),
            read_templates(self.world.settings),
            ExecutorMetrics(self.world.settings, [run.graph_id]),
            self._beginning,
        )
        return Execution(run, Lease(time.monotonic() + 3600), services)

    async def stored(self, key: RunKey) -> tuple[str, Any, int]:
        """Status, error and number of stored states of a run."""
        async with self.world.pool.connection() as connection:
            cursor = await connection.execute(
                "select r.status, r.error, (select count(*) from state_snapshots s where s.tenant = r.tenant"
                " and s.user_id = r.user_id and s.thread_id = r.thread_id::text)"
                " from runs r where r.tenant = %s and r.user_id = %s and r.run_id = %s",
                tuple(key),
            )
            row = await cursor.fetchone()
        assert row is not None
        return row[0], row[1], row[2]


@asynccontextmanager
async def open_executor(database: str, redis_url: str, folder: Path, **ways: Any) -> AsyncIterator[Executor]:
    """An executor on its own world; ``ways`` are those of ``open_world``."""
    sync_durability.install()
    whole_steps.install()
    async with open_world(database, redis_url, **ways) as world:
        made = Executor(world, folder / "no-host.sock")
        yield made
        await made.placement.aclose()


@pytest.fixture
async def executor(database: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Executor]:
    async with open_executor(database, redis_url, tmp_path) as made:
        yield made
