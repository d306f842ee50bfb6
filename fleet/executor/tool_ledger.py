"""The ledger of one run's tool calls: what was started is known before it takes effect, what has ended is never repeated.

A call is known by its place in the graph, which is the same whenever the graph goes on from a checkpoint: the task (its
namespace holds the task's id, which LangGraph makes of the checkpoint, the node and the task's path), the AI message and
the place in it. A model's own ids are no help, since models repeat them. A node's own calls have no message; they are
known by the tool, its arguments and how often the node has made the same call before.
"""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.errors import GraphBubbleUp, ParentCommand
from psycopg import AsyncConnection
from psycopg_pool import PoolTimeout

from sandfleet.fleet.executor.fenced_rows import ToolCallRow
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks, Link
from sandfleet.fleet.executor.recorded_errors import describe, rebuild
from sandfleet.fleet.executor.run_request import durability
from sandfleet.fleet.tools import CallOrphaned
from sandfleet.shared.errors import Superseded
from sandfleet.shared.fault_points import meet
from sandfleet.shared.json_text import to_json
from sandfleet.shared.store.claims import ClaimedRun

T = TypeVar("T")

MAX_RESULT_BYTES = 4 * 1024 * 1024
"""A larger result is not kept; a replay that needs it is told so."""

_MAX_ERROR = 2000
_MAX_ID = 200
_RUNS_BEFORE = 50  # that are looked through for a call of an interrupted task: it takes one per answer
_PAUSE_S = 0.5

_BROKEN_OFF = (
    "The call of {name} was broken off: the executor was lost after the call had started and before its result was"
    " recorded. It may or may not have taken effect, and was not repeated. Find out before you call it again."
)
_UNKNOWN = (
    "The call of {name} was not made: the executor was lost while this step was at work, it had called {name} before,"
    " and what it asks for now cannot be told from that call. That one may or may not have taken effect. Find out before"
    " you call it again."
)
_NOT_KEPT = (
    "The call of {name} ended before the executor was lost and has taken effect, but its result could not be kept. It was"
    " not repeated."
)


class Asked(NamedTuple):
    """Where an AI message asks for a tool call. ``message`` is its id, or its position in the state."""

    message: str
    place: int
    tool_call_id: str | None


class Call(NamedTuple):
    """One execution of a tool call; ``execution`` counts the executions before it that the graph has asked for."""

    call_id: UUID
    execution: int
    ns: str
    message_id: str | None
    tool_call_id: str | None
    name: str
    idempotent: bool


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a call gives without being made: a value, or an error to raise."""

    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Executions:
    """The executions of one call by this attempt. A node that is tried again counts them anew: it meets the results of
    those that ended well, and makes those again that did not."""

    node_attempt: int = 0
    next: int = 0
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def take(self, node_attempt: int) -> int:
        """The number of the execution that begins now."""
        if self.node_attempt != node_attempt:
            self.node_attempt = node_attempt
            self.next = 0
        while self.next in self.begun and self.next not in self.ended:
            self.next += 1
        n = self.next
        self.begun.add(n)
        self.next += 1
        return n


class ToolLedger:
    """The ledger of one run under one attempt. Methods that take a `Link` run on its event loop; the others anywhere."""

    def __init__(
        self, run: ClaimedRun, lease: Lease, serializer: SerializerProtocol, links: LedgerLinks
    ) -> None:
        self.fence = run.fence
        self.links = links
        self._thread_id = str(run.thread_id)
        self._lease = lease
        self._serializer = serializer
        self.bodies: set[Call] = set()
        """Calls whose tool is at work now."""
        self.error: BaseException | None = None
        """What the last tool that failed has raised."""
        self._lock = threading.Lock()  # synchronous tools call from threads of their own
        self._executions: dict[UUID, _Executions] = {}
        # A resume, or a run without input, goes on from the checkpoint of a run before, in the middle of its tasks.
        command = run.kwargs.get("command")
        self._goes_on = "resume" in command if command else run.kwargs.get("input") is None
        # Where earlier attempts began, no checkpoint was written, so this one is no replay of them.
        self._begins_anew = not run.resumes and (durability(run) == "exit" or not self._goes_on)

    def call(
        self,
        *,
        ns: str,
        node_attempt: int,
        name: str,
        tool_call_id: str | None,
        asked: Asked | None,
        arguments: Any,
        idempotent: bool,
    ) -> Call:
        """The execution that begins now. ``arguments`` are without what the runtime injects; they tell calls
        apart that no message asked for."""
        which: tuple[Any, ...]
        if asked is not None:
            which = (asked.message, asked.place)
        else:
            which = (hashlib.sha256(to_json(arguments)).hexdigest(),)
        # The task in ``ns`` is one of a checkpoint, and the same for each run that goes on from that.
        known_by = (self._thread_id, ns, name, tool_call_id, *which)
        call_id = UUID(bytes=hashlib.sha256(repr(known_by).encode()).digest()[:16])
        with self._lock:
            n = self._executions.setdefault(call_id, _Executions()).take(node_attempt)
        message_id = asked.message if asked is not None else None
        return Call(call_id, n, ns, message_id, tool_call_id, name, idempotent)

    async def begin(self, link: Link, call: Call) -> Recorded | None:
        """Commit that the call starts, unless it must not: then what it gives instead. Raises Superseded."""
        await meet("tool.before_ledger")
        if self._lease.in_doubt():
            await self._lease.certain()
        if self.fence.attempt > 1 or self._goes_on or call.execution in self._executions[call.call_id].ended:
            recorded = await self._recorded(link, call)
            if recorded is not None:
                return recorded
        await self._write(link, call, "started")
        if self._lease.in_doubt():  # the commit may have taken long
            await self._lease.certain()
        await meet("tool.started")
        return None

    async def returned(self, link: Link, call: Call, value: Any) -> None:
        """Commit what the tool returned."""
        await meet("tool.effect_done")
        error = value.text if isinstance(value, ToolMessage) and value.status == "error" else None
        status = "finished" if error is None else "failed"
        await self._write(link, call, status, outcome="returned", value=value, error=error)
        self._executions[call.call_id].ended.add(call.execution)
        await meet("tool.recorded")

    async def raised(self, link: Link, call: Call, error: BaseException) -> None:
        """Commit what the tool raised: its failure, or a command to the parent graph. A call that was paused by an
        interrupt is forgotten: it begins anew when the graph is resumed."""
        if isinstance(error, ParentCommand):
            await self._write(link, call, "finished", outcome="raised", value=error.args[0])
            self._executions[call.call_id].ended.add(call.execution)
        elif isinstance(error, GraphBubbleUp):
            await self._forget(link, call)
        elif isinstance(error, Exception) and not isinstance(error, Superseded):
            self.error = error
            await meet("tool.effect_done")
            text = f"{type(error).__name__}: {error}"
            await self._write(link, call, "failed", outcome="raised", value=describe(error), error=text)
            await meet("tool.recorded")
        # else: the run ends or goes elsewhere, and nobody knows how far the call came.

    async def _write(
        self,
        link: Link,
        call: Call,
        status: str,
        *,
        outcome: str | None = None,
        value: Any = None,
        error: str | None = None,
    ) -> None:
        kind, body = None, None
        if outcome is not None:
            try:
                kind, body = self._serializer.dumps_typed(value)
            except Exception:  # an object of the tool's own that has no serialised form
                outcome = None
            if body is not None and len(body) > MAX_RESULT_BYTES:
                outcome, kind, body = None, None, None
        row = ToolCallRow(
            call.call_id,
            call.execution,
            _storable(call.ns),
            _storable(call.message_id, _MAX_ID),
            _storable(call.tool_call_id, _MAX_ID),
            _storable(call.name, _MAX_ID),
            status,
            outcome,
            kind,
            body,
            _storable(error, _MAX_ERROR),
        )
        await link.writer.write(self.fence, [row])

    async def _recorded(self, link: Link, call: Call) -> Recorded | None:
        found = await self._persistently(link, lambda connection: self._find(connection, call))
        if found is None and self._goes_on:
            found = await self._persistently(link, lambda connection: self._find_before(connection, call))
        if found is None:
            if self.fence.attempt > 1 and not call.idempotent:
                seen = list(self._executions)
                if await self._persistently(link, lambda connection: self._doubtful(connection, call, seen)):
                    return await self._orphan(link, call, _UNKNOWN)
            return None
        status, outcome, kind, body = found
        if outcome is not None:
            value = self._serializer.loads_typed((kind, body))
            if outcome == "raised" and status == "failed":
                return Recorded(error=rebuild(value))
            self._executions[call.call_id].ended.add(call.execution)
            return Recorded(value) if outcome == "returned" else Recorded(error=ParentCommand(value))
        if call.idempotent:
            return None
        if status in ("started", "orphaned"):
            return await self._orphan(link, call, _BROKEN_OFF)
        return _surfaced(call, _NOT_KEPT)

    async def _orphan(self, link: Link, call: Call, why: str) -> Recorded:
        await self._write(link, call, "orphaned")
        return _surfaced(call, why)

    async def _find(self, connection: AsyncConnection[Any], call: Call) -> tuple[Any, ...] | None:
        cursor = await connection.execute(
            """select status, outcome, type, body from tool_calls
               where tenant = %s and user_id = %s and run_id = %s and call_id = %s and execution = %s""",
            (*self.fence.key, call.call_id, call.execution),
        )
        return await cursor.fetchone()

    async def _find_before(self, connection: AsyncConnection[Any], call: Call) -> tuple[Any, ...] | None:
        """The call in a run that this one goes on from, which had made it before the task was interrupted."""
        cursor = await connection.execute(
            """select c.status, c.outcome, c.type, c.body
               from (select run_id, seq from runs where tenant = %(tenant)s and user_id = %(user_id)s
                       and thread_id = %(thread_id)s::uuid and run_id <> %(run_id)s order by seq desc limit %(runs)s) r
               join tool_calls c on c.tenant = %(tenant)s and c.user_id = %(user_id)s and c.run_id = r.run_id
                 and c.call_id = %(call_id)s and c.execution >= %(execution)s
               where c.status <> 'failed' or c.outcome = 'returned'
               order by c.execution, r.seq desc limit 1""",
            {
                **self.fence.key._asdict(),
                "thread_id": self._thread_id,
                "runs": _RUNS_BEFORE,
                "call_id": call.call_id,
                "execution": call.execution,
            },
        )
        return await cursor.fetchone()

    async def _doubtful(self, connection: AsyncConnection[Any], call: Call, seen: list[UUID]) -> bool:
        """Whether an earlier attempt has called the tool in a way that this call may be the repetition of.

        In a replay from a checkpoint such calls were seen by their identity. Not so where the replay asks a model anew:
        in a node that calls model and tools itself, in a subgraph without checkpoints, in a run without any.
        """
        cursor = await connection.execute(
            r"""
            select exists (
              select 1 from tool_calls c
              where c.tenant = %(tenant)s and c.user_id = %(user_id)s and c.run_id = %(run_id)s
                and c.name = %(name)s and c.attempt < %(attempt)s and c.call_id <> all (%(seen)s)
                and (%(begins_anew)s
                     or (c.ns = %(ns)s and c.message_id is distinct from %(message_id)s)
                     or (c.ns = %(ns)s and c.message_id is null)
                     or (c.ns <> %(ns)s and strpos(c.ns, '|') > 0 and split_part(c.ns, '|', 1) = split_part(%(ns)s, '|', 1)
                         and not exists (
                           select 1 from checkpoints k
                           where k.tenant = c.tenant and k.user_id = c.user_id and k.thread_id = %(thread_id)s
                             and k.ns = regexp_replace(c.ns, '\|[^|]*$', '')))))
            """,
            {
                **self.fence.key._asdict(),
                "attempt": self.fence.attempt,
                "name": _storable(call.name, _MAX_ID),
                "ns": _storable(call.ns),
                "message_id": _storable(call.message_id, _MAX_ID),
                "seen": seen,
                "begins_anew": self._begins_anew,
                "thread_id": self._thread_id,
            },
        )
        row = await cursor.fetchone()
        return row is not None and bool(row[0])

    async def _forget(self, link: Link, call: Call) -> None:
        async def delete(connection: AsyncConnection[Any]) -> bool:
            cursor = await connection.execute(
                """
                with held as materialized (
                  select 1 from runs where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
                    and attempt = %(attempt)s and status = 'running' for share),
                forgotten as (
                  delete from tool_calls where tenant = %(tenant)s and user_id = %(user_id)s and run_id = %(run_id)s
                    and call_id = %(call_id)s and execution = %(execution)s and exists (select 1 from held))
                select exists (select 1 from held)
                """,
                {**self.fence.key._asdict(), "attempt": self.fence.attempt, **call._asdict()},
            )
            row = await cursor.fetchone()
            return row is not None and bool(row[0])

        if not await self._persistently(link, delete):
            raise Superseded("Another attempt, or the end of the run, came first.")

    async def _persistently(self, link: Link, work: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
        """Work on the database until it answers: its absence is a pause. Raises Superseded when the lease is lost."""
        while True:
            try:
                async with link.connections.connection() as connection:
                    return await work(connection)
            except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, OSError):
                if self._lease.superseded:
                    raise Superseded("Another executor has taken this run over.") from None
                await asyncio.sleep(_PAUSE_S)


def _surfaced(call: Call, why: str) -> Recorded:
    text = why.format(name=call.name)
    if call.tool_call_id is None:
        return Recorded(error=CallOrphaned(text))
    return Recorded(ToolMessage(text, tool_call_id=call.tool_call_id, name=call.name, status="error"))


def _storable(text: str | None, limit: int | None = None) -> Any:
    """Text that PostgreSQL can hold, cut at ``limit`` characters."""
    if text is None:
        return None
    return text[:limit].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
