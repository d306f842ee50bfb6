"""Stands in for an executor: claims and ends runs by the functions that executors use, and writes what a test says.

Whole runs with the real one are tested elsewhere; here the API's behaviour depends on what a run has come to.
"""

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from redis.asyncio import Redis

from sandfleet.shared.ids import RunKey
from sandfleet.shared.store.claims import ClaimedRun, Ending, claim, finish
from sandfleet.shared.streams.append import Appender, Entry
from sandfleet.shared.streams.entry import EventId, encode
from tests.waiting import eventually


@dataclass
class Executor:
    """One connection and the streams of one Redis."""

    connection: psycopg.AsyncConnection[Any]
    appender: Appender

    @classmethod
    async def open(cls, database_url: str, redis: "Redis") -> "Executor":
        connection = await psycopg.AsyncConnection.connect(database_url, autocommit=True)
        return cls(connection, Appender(redis, ttl_s=60, max_entries=1000))

    async def aclose(self) -> None:
        await self.connection.close()

    async def claim(self, run_id: str | UUID | None = None) -> ClaimedRun:
        """Claim the next ready run, which must be this one if one is named."""

        async def one() -> list[ClaimedRun]:
            return await claim(self.connection, "default", "test-executor", 3600, 1, longest_waiting=False)

        run: ClaimedRun = (await eventually(one, what="a ready run"))[0]
        assert run_id is None or run.fence.key.run_id == UUID(str(run_id))
        await self.emit(
            run, 0, "metadata", {"run_id": str(run.fence.key.run_id), "attempt": run.fence.attempt}
        )
        return run

    async def emit(self, run: ClaimedRun, seq: int, event: str, data: Any) -> None:
        """Journal an event and append it to the run's stream."""
        text = json.dumps(data)
        await self.connection.execute(
            "insert into journal (tenant, user_id, run_id, attempt, seq, event, data) values (%s, %s, %s, %s, %s, %s, %s)",
            (*run.fence.key, run.fence.attempt, seq, event, text),
        )
        await self._append(run, seq, event, text)

    async def _append(self, run: ClaimedRun, seq: int, event: str, text: str) -> None:
        entry = Entry(
            run.fence.key.run_id,
            EventId(run.fence.attempt, seq),
            encode([(seq, event, text.encode())]),
            True,
        )
        await self.appender.append([entry])

    async def snapshot(
        self,
        run: ClaimedRun,
        checkpoint_id: str,
        values: Any,
        *,
        parent: str | None = None,
        following: list[str] | None = None,
        tasks: list[Any] | None = None,
        refs: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
        ns: str = "",
    ) -> None:
        """Store a state of the run's thread."""
        await self.connection.execute(
            """insert into state_snapshots
                 (tenant, user_id, thread_id, ns, checkpoint_id, run_id, parent_id, "values", refs, next, tasks, metadata, created_at)
               values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, '2026-01-01T00:00:00+00:00')""",
            (
                run.fence.key.tenant,
                run.fence.key.user_id,
                str(run.thread_id),
                ns,
                checkpoint_id,
                run.fence.key.run_id,
                parent,
                json.dumps(values),
                json.dumps(refs or {}),
                json.dumps(following or []),
                json.dumps(tasks or []),
                json.dumps(metadata or {}),
            ),
        )

    async def finish(
        self,
        run: ClaimedRun,
        seq: int,
        *,
        status: Any = None,
        output: Any = None,
        error: dict[str, str] | None = None,
        thread_status: str | None = "idle",
        interrupts: dict[str, Any] | None = None,
        rollback: bool = False,
    ) -> None:
        """End the run; ``seq`` is the number of its next event. An update that fails leaves its thread as it was."""
        if error is not None:
            thread_status = "error" if run.kind == "run" else None
        events: list[tuple[int, str, str]] = []
        if error is not None:
            events.append((seq, "error", json.dumps(error)))
        events.append((seq + len(events), "end", "null"))
        mine, _ = await finish(
            self.connection,
            run.fence,
            Ending(
                status=status or ("error" if error else "success"),
                events=json.dumps(events),
                error=json.dumps(error) if error else None,
                output=json.dumps(output or {"checkpoint_id": None, "interrupts": {}}),
                thread_status=thread_status,
                interrupts=None if thread_status is None else json.dumps(interrupts or {}),
                rollback=rollback,
            ),
        )
        assert mine
        for number, event, text in events:
            await self._append(run, number, event, text)

    @staticmethod
    def key(run: ClaimedRun) -> RunKey:
        return run.fence.key
