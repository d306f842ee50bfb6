"""Runs of a graph in this process, attempt after attempt, with the ledger, the saver and PostgreSQL as they are."""

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sandfleet.fleet.executor import intercept_tools, sync_durability, tool_ledger
from sandfleet.fleet.executor.fenced_writer import FencedWriter
from sandfleet.fleet.executor.intercept_tools import LEDGER_KEY, current_ledger
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks
from sandfleet.fleet.executor.run_request import build_config, build_input, durability
from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.fleet.executor.tool_ledger import ToolLedger
from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.errors import Superseded
from sandfleet.shared.ids import Fence, RunKey, new_id
from sandfleet.shared.store.claims import ClaimedRun

OWNER = ("acme", "ann")


class Broken(Exception):
    """The attempt was broken off at the point that the test named."""


class Runs:
    """Runs on one thread of a graph. Each `attempt` takes the newest run over from the attempt before."""

    def __init__(
        self, connection: psycopg.AsyncConnection[Any], writer: FencedWriter, pool: Pool, links: LedgerLinks
    ) -> None:
        self.connection = connection
        self._writer = writer
        self._pool = pool
        self._links = links
        self.thread_id = uuid.uuid4()
        self.run_id = uuid.uuid4()
        self.lease = Lease(time.monotonic() + 3600)
        self._kwargs: dict[str, Any] = {}
        self._attempt = 0
        self._hold: str | None = None
        self._times = itertools.count(1)
        self._nth = 1
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def meet(self, name: str) -> None:
        """Stands for the ledger's named points: holds the attempt there until it is given up."""
        if name == self._hold and next(self._times) == self._nth:
            self._reached.set()
            while not self._released.is_set():
                await asyncio.sleep(0.01)
            raise Superseded("broken off")

    async def begin(self, **kwargs: Any) -> None:
        """A new run with these parameters on the thread."""
        self.run_id, self._attempt, self._kwargs = new_id(), 0, kwargs
        await self.connection.execute(
            """insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
                                 attempt, multitask_strategy, timeout_s, kwargs, metadata)
               values (%s, %s, %s, %s, %s, 'g', 'run', 'default', 1, 'running', 0, 'enqueue', 60, '{}', '{}')""",
            (*OWNER, self.run_id, self.thread_id, uuid.uuid4()),
        )

    async def attempt(self, graph: Any, *, breaks_at: str | None = None, nth: int = 1) -> Any:
        """Let the next attempt run the graph; returns its values. With ``breaks_at`` it is lost when it comes to that
        point for the ``nth`` time, and Broken is raised."""
        self._attempt += 1
        await self.connection.execute(
            "update runs set attempt = %s where run_id = %s", (self._attempt, self.run_id)
        )
        cursor = await self.connection.execute(
            "select count(*) from checkpoints where run_id = %s and ns = ''", (self.run_id,)
        )
        ((written,),) = await cursor.fetchall()
        fence = Fence(RunKey(*OWNER, self.run_id), self._attempt)
        run = ClaimedRun(
            fence=fence,
            thread_id=self.thread_id,
            assistant_id=uuid.uuid4(),
            graph_id="g",
            kind="run",
            run_class=1,
            vtime=0,
            kwargs=self._kwargs,
            metadata={},
            cancel_action=None,
            claimed_at=datetime.now(UTC),
            timeout_s=60,
            remaining_s=60,
            resumes=self._attempt > 1 and written > 0,
            head_checkpoint_id=None,
            created_at=datetime.now(UTC),
            ready_at=None,
        )
        saver = FencedSaver(self._writer, self._pool, fence.key.owner, fence)
        ledger = ToolLedger(run, self.lease, saver.serde, self._links)
        config = build_config(run, saver, [])
        config["configurable"][LEDGER_KEY] = ledger
        self._hold, self._nth, self._times = breaks_at, nth, itertools.count(1)
        self._reached, self._released = asyncio.Event(), asyncio.Event()

        async def work() -> Any:
            current_ledger.set(ledger)
            return await graph.ainvoke(build_input(run), config, durability=durability(run))

        task = asyncio.create_task(work())
        reached = asyncio.create_task(self._reached.wait())
        await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            values = await task
            assert breaks_at is None, f"never came to {breaks_at}"
            return values
        # From here on the attempt writes nothing, as if it had died.
        await self.connection.execute(
            "update runs set attempt = attempt + 1 where run_id = %s", (self.run_id,)
        )
        self._attempt += 1
        task.cancel()
        await asyncio.wait([task])
        self._released.set()
        await asyncio.sleep(0.02)
        self._hold = None
        raise Broken

    async def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        """The ledger of the newest run, in the order in which calls started."""
        names = ", ".join(columns or ("name", "status"))
        cursor = await self.connection.execute(
            f"select {names} from tool_calls where run_id = %s order by started_at, execution".encode(),
            (self.run_id,),
        )
        return await cursor.fetchall()


@pytest.fixture
async def runs(database: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runs]:
    intercept_tools.install()
    sync_durability.install()
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
        open_pool(database, 4) as pool,
    ):
        writer = FencedWriter(database)
        await writer.start()
        links = LedgerLinks(database, writer, pool)
        made = Runs(connection, writer, pool, links)
        monkeypatch.setattr(tool_ledger, "meet", made.meet)
        yield made
        await links.aclose()
        await writer.stop()


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """The file outside that tools append to."""
    path = tmp_path / "lines"
    path.touch()
    return path
