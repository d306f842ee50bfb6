"""A stack that a test may break, what its clients do meanwhile, and what PostgreSQL has of their runs afterwards."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.deployment_check import check_stack
from sandfleet.localstack.stack import Stack
from tests.faults.view import View, watch
from tests.fixtures_stack import start_stack
from tests.waiting import eventually

LEASE_S = 4.0
ENDS_WITHIN_S = 120.0  # a run on a slow and loaded machine, its recovery included


@dataclass
class Answer:
    """What a request was answered with, and after how long; status 0: the connection broke."""

    status: int
    took_s: float
    at: float
    """`time.monotonic` when it was sent."""
    body: Any = None
    retry_after: str | None = None

    @property
    def ended(self) -> float:
        """`time.monotonic` when the answer was there."""
        return self.at + self.took_s


@dataclass
class Fleet:
    """A running stack, and its first user's clients."""

    stack: Stack
    client: LangGraphClient
    http: httpx.AsyncClient
    points: Path
    views: dict[str, View] = field(default_factory=dict)
    """What the client of each run that is followed has seen so far."""
    watching: dict[str, "asyncio.Task[View]"] = field(default_factory=dict)

    async def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of one statement on the stack's database."""
        async with await psycopg.AsyncConnection.connect(
            self.stack.info.database_url, autocommit=True
        ) as connection:
            cursor = await connection.execute(statement.encode(), parameters)
            return await cursor.fetchall() if cursor.description else []

    # --- clients ---------------------------------------------------------------------------------------------------

    async def begin(self, graph: str, values: Any, **options: Any) -> str:
        """Submit a run on a thread of its own and follow it; its id."""
        thread_id = (await self.client.threads.create())["thread_id"]
        run = await self.client.runs.create(thread_id, graph, input=values, stream_resumable=True, **options)
        self.follow(thread_id, run["run_id"])
        return run["run_id"]

    def follow(self, thread_id: str, run_id: str) -> None:
        """Follow a run in the background."""
        self.views[run_id] = View(thread_id, run_id)
        self.watching[run_id] = asyncio.create_task(watch(self.http, self.views[run_id]))

    async def seen(self, run_id: str) -> View:
        """All that the run's client saw, once its stream has ended."""
        async with asyncio.timeout(ENDS_WITHIN_S):
            return await asyncio.shield(self.watching[run_id])

    async def post(self, path: str, body: Any, timeout_s: float = 60.0, **headers: str) -> Answer:
        """One request, whatever comes of it."""
        sent = time.monotonic()
        try:
            answer = await self.http.post(path, json=body, timeout=timeout_s, headers=headers)
        except httpx.HTTPError:
            return Answer(0, time.monotonic() - sent, sent)
        took = time.monotonic() - sent
        content = answer.json() if answer.content else None
        return Answer(answer.status_code, took, sent, content, answer.headers.get("retry-after"))

    # --- what PostgreSQL has -----------------------------------------------------------------------------------------

    async def row(self, run_id: str) -> tuple[str, int, int]:
        """Status, attempt and deaths of a run."""
        ((status, attempt, deaths),) = await self.sql(
            "select status, attempt, deaths from runs where run_id = %s", run_id
        )
        return status, attempt, deaths

    async def over(self, run_id: str) -> str:
        """The final status of a run, once it has one."""

        async def status() -> str:
            found = (await self.row(run_id))[0]
            return "" if found in ("pending", "running") else found

        return await eventually(status, ENDS_WITHIN_S, f"the end of {run_id}")  # type: ignore[no-any-return]

    async def calls(self, name: str) -> list[float]:
        """When the model was called under a correlation id (`time.monotonic`)."""
        root = self.stack.info.provider_url.removesuffix("/v1")
        answer = await self.http.get(f"{root}/_requests", params={"id": name})
        return [arrival["monotonic_s"] for arrival in answer.json()["requests"]]

    async def journal(self, run_id: str) -> list[tuple[int, int, str]]:
        """A run's journal as (attempt, seq, event)."""
        return await self.sql(  # type: ignore[return-value]
            "select attempt, seq, event from journal where run_id = %s order by attempt, seq", run_id
        )

    async def values(self, run_id: str) -> dict[str, Any]:
        """What ``join`` gives."""
        return await self.client.runs.join(self.views[run_id].thread_id, run_id)  # type: ignore[return-value]

    def processes(self) -> dict[str, int]:
        """Process ids of API, executors and host by name."""
        found = self.stack.info.processes
        return {name: pid for name, pid in found.items() if name.startswith(("api", "executor", "host"))}

    # --- faults ------------------------------------------------------------------------------------------------------

    def arm(self, point: str, action: str = "kill") -> None:
        """Let the next process that comes to a named point be killed, stopped, or lose its reply."""
        for old in self.points.glob(f"{point}.reached-by-*"):
            old.unlink()
        (self.points / point).write_text(action)

    async def reached(self, point: str) -> int:
        """The id of the process that came to the point."""
        (path,) = await eventually(
            lambda: list(self.points.glob(f"{point}.reached-by-*")), ENDS_WITHIN_S, f"{point} reached"
        )
        return int(path.name.rpartition("-")[2])

    @asynccontextmanager
    async def frozen(self, *servers: str) -> AsyncIterator[None]:
        """The servers answer nobody within the block, and connections to them hang."""
        for name in servers:
            await self.stack.pause(name)
        try:
            yield
        finally:
            for name in servers:
                await self.stack.resume(name)

    async def stop(self, name: str) -> None:
        """Stop a server: connections to it are refused until it is restarted."""
        await self.stack.supervisor.stop(name)

    async def in_order(self) -> None:
        """No invariant is broken, within the minute that what is outside PostgreSQL may take."""

        async def violations() -> list[Any]:
            return list((await check_stack(self.stack.info)).violations)

        async def none() -> bool:
            return not await violations()

        try:
            await eventually(none, 70, "invariants")
        except AssertionError:
            raise AssertionError(f"invariants are broken: {await violations()}") from None

    async def well(self) -> None:
        """Return when a run passes through as on any day."""

        async def passes() -> bool:
            answer = await self.post("/runs/wait", {"assistant_id": "counter", "input": {"steps": 1}})
            return answer.status == 200 and "digest" in (answer.body or {})

        await eventually(passes, ENDS_WITHIN_S, "a run that passes through")


@asynccontextmanager
async def open_fleet(engine: str, kind: str, *, executors: int = 2, **env: str) -> AsyncIterator[Fleet]:
    """A stack with short leases, whose dead processes come back."""
    points = Path(os.environ.get("TMPDIR", "/tmp")) / f"sandfleet-points-{os.getpid()}-{kind}"
    points.mkdir()
    stack = await start_stack(
        engine,
        kind,
        executors=executors,
        restart=True,
        SANDFLEET_LEASE_S=str(LEASE_S),
        SANDFLEET_RENEW_EVERY_S="1",
        SANDFLEET_LONG_POLL_S="2",
        SANDFLEET_VISIBILITY_TIMEOUT_S="20",
        SANDFLEET_FAULT_POINTS=str(points),
        **env,
    )
    try:
        async with (
            get_client(url=stack.info.api_url, api_key=stack.info.api_key) as client,
            httpx.AsyncClient(
                base_url=stack.info.api_url,
                headers={"x-api-key": stack.info.api_key},
                timeout=httpx.Timeout(60, pool=None),
                limits=httpx.Limits(max_connections=None),
            ) as http,
        ):
            fleet = Fleet(stack, client, http, points)
            yield fleet
            for task in fleet.watching.values():
                task.cancel()
            await asyncio.gather(*fleet.watching.values(), return_exceptions=True)
    finally:
        removed = await stack.stop()
        shutil.rmtree(points, ignore_errors=True)
    assert removed == []
