"""One run, from its claim to its end: the graph is streamed, every event and state is kept, one transaction ends it."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, TypeGuard, TypeVar, cast

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.types import StateSnapshot
from psycopg_pool import PoolTimeout

from sandfleet.fleet.executor import breakpoints, kept_workspace, run_spans
from sandfleet.fleet.executor.commands import input_of_attempt
from sandfleet.fleet.executor.failure_stage import Stage, of_graph_error
from sandfleet.fleet.executor.fenced_writer import ExecutorStopped, FencedWriter
from sandfleet.fleet.executor.finisher import Finisher
from sandfleet.fleet.executor.intercept_tools import LEDGER_KEY, current_ledger
from sandfleet.fleet.executor.lease import Lease
from sandfleet.fleet.executor.ledger_links import LedgerLinks
from sandfleet.fleet.executor.message_events import MessageEvents
from sandfleet.fleet.executor.metrics import ExecutorMetrics
from sandfleet.fleet.executor.outgoing import current_watch
from sandfleet.fleet.executor.placement import Placement
from sandfleet.fleet.executor.publisher import Publisher, RunStream
from sandfleet.fleet.executor.run_request import (
    build_config,
    durability,
    graph_modes,
    head_config,
)
from sandfleet.fleet.executor.run_spans import CallSpans
from sandfleet.fleet.executor.run_usage import RunUsage
from sandfleet.fleet.executor.saver import FencedSaver
from sandfleet.fleet.executor.snapshots import interrupts_by_task, payload_rows, state_rows
from sandfleet.fleet.executor.tool_ledger import ToolLedger
from sandfleet.fleet.executor.watch_calls import CallWatch
from sandfleet.fleet.graphs.loading import Graph
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox, current_sandbox
from sandfleet.fleet.tools import running_call
from sandfleet.shared import logs, tracing
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import SandfleetError, Superseded
from sandfleet.shared.json_text import to_json
from sandfleet.shared.sandbox_token import sign
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import ClaimedRun, Ending, at
from sandfleet.shared.store.ready import ReadyRuns
from sandfleet.shared.templates import CONFIG_KEY, TemplateRefused, Templates
from sandfleet.shared.tracing import Span

_log = logging.getLogger(__name__)

T = TypeVar("T")

_UNJOURNALLED = ("values", "messages", "checkpoints", "debug")
_FINISH_PAUSE_S = 0.5
_LOOK_AGAIN_S = 0.05


class Stop(Enum):
    """Why the executor stops a run."""

    INTERRUPT = "interrupt"
    ROLLBACK = "rollback"
    TIMEOUT = "timeout"
    SUPERSEDED = "superseded"
    HAND_OVER = "hand_over"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Ended:
    """How the work on a run ended here. ``hand_over``: it is still ours and must be given back, as ready or to wait for
    room (``no_room``)."""

    ready: ReadyRuns
    hand_over: bool = False
    no_room: bool = False


@dataclass(frozen=True, slots=True)
class Services:
    """What all runs of an executor share, on the event loop of the graphs."""

    settings: Settings
    graphs: dict[str, Graph]
    pool: Pool
    finisher: Finisher
    writer: FencedWriter
    publisher: Publisher
    placement: Placement
    ledger_links: LedgerLinks
    templates: Templates
    metrics: ExecutorMetrics
    beginning: asyncio.Lock
    """Held for a moment by the run that begins next."""


class Execution:
    """The execution of one claimed run. Lives on the event loop of the graphs."""

    def __init__(self, run: ClaimedRun, lease: Lease, services: Services) -> None:
        self.run = run
        self.lease = lease
        self._services = services
        self._stop: Stop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._base = lease.claimed  # the moment that run.claimed_at names on the database's clock
        self._prepared: float | None = None
        counted = partial(services.metrics.used, run.fence.key.tenant)
        self.usage = RunUsage(run.fence, services.writer, services.settings.prices, counted)
        self._watch = CallWatch(lease, self.usage.add)
        self._spans = CallSpans() if tracing.on() else None
        self._span = Span()
        self._failed_at: Stage | None = None
        self._requested: list[str] = run.kwargs.get("stream_mode") or ["values"]
        self._messages = MessageEvents(
            pairs="messages-tuple" in self._requested, accumulated="messages" in self._requested
        )
        self._saver = FencedSaver(
            services.writer,
            services.pool,
            run.fence.key.owner,
            run.fence,
            head_known_empty=run.head_checkpoint_id is None,
        )
        self._ledger = ToolLedger(run, lease, self._saver.serde, services.ledger_links)
        self._head_id = run.head_checkpoint_id
        self._known_blobs: set[bytes] = set()
        self._in_passing = False  # states of subgraphs were submitted
        self._over = False  # the run has ended by this attempt
        self._head_next: Sequence[str] | None = None
        self._asked: dict[str, Any] | None = None
        """What waits for an answer in the newest state, once that was read."""

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop."""
        return self._stop is not None

    def stop(self, reason: Stop) -> None:
        """Break the run off. The first reason stands, but losing the lease overrides it."""
        if self._stop is None or reason is Stop.SUPERSEDED:
            self._stop = reason
        if self._task is not None:
            self._task.cancel()

    async def execute(self) -> Ended:
        """Run the graph and end the run. Never raises for what a graph or a client did."""
        self._task = asyncio.current_task()
        logs.about.set({**self._ids(), "thread_id": str(self.run.thread_id), "graph": self.run.graph_id})
        current_watch.set(self._watch)
        pool = self._services.settings.pool
        with run_spans.of_run(self.run, pool, self._base) as self._span:
            return await self._execute()

    async def _execute(self) -> Ended:
        run = self.run
        self._services.metrics.claimed(run)
        stream = self._services.publisher.open(run.fence, self._head_id)
        sandbox = RunSandbox(
            run.fence, self._sandbox_token, self._services.placement, partial(self._wait_for_room, stream)
        )
        current_sandbox.set(sandbox)
        current_ledger.set(self._ledger)
        timer = asyncio.get_running_loop().call_later(max(run.remaining_s, 0), self.stop, Stop.TIMEOUT)
        try:
            if self._stop is None and run.cancel_action:
                self._stop = Stop(run.cancel_action)
            elif self._stop is None and run.remaining_s <= 0:
                self._stop = Stop.TIMEOUT
            ending = await self._ending(stream, sandbox) if self._stop is None else self._broken_off()
            if ending is None:
                given_back = self._stop in (Stop.HAND_OVER, Stop.NO_ROOM)
                if given_back:
                    await _undisturbed(self._settle(stream))
                no_room = self._stop is Stop.NO_ROOM
                why = "no_room" if no_room else "handed_over" if given_back else "superseded"
                self._services.metrics.left(run, why)
                self._span.set("sandfleet.status", why)
                return Ended({}, hand_over=given_back, no_room=no_room)
            with tracing.span("finish"):
                ready = await _undisturbed(self._finish(stream, ending))
            self._task = None  # there is nothing left to break off, and the rest must be done
            if ready is None:
                self._services.metrics.left(run, "superseded")
                return Ended({})
            ended_at = run.claimed_at + timedelta(seconds=time.monotonic() - self._base)
            self._services.metrics.ended(run, ending, ended_at, self._failed_at)
            self._span.set("sandfleet.status", ending.status)
            if self._failed_at is not None:
                self._span.failed(self._failed_at)
            await sandbox.close()
            return Ended(ready)
        finally:
            self._task = None
            timer.cancel()
            self._watch.close()
            if self._spans is not None:
                self._spans.close()
            sandbox.leave()
            self._services.publisher.close(stream)

    async def _ending(self, stream: RunStream, sandbox: RunSandbox) -> Ending | None:
        """Run the graph; returns how the run ends, or None when it does not end here."""
        run = self.run
        try:
            if run.fence.attempt > 1:
                # Who watches a run that was taken over has waited long enough: it is told before the work begins.
                await stream.drain()
            # One after the other: the first step of a run is all computation, and those of a hundred that were claimed at
            # once would hold the loop for a second.
            async with self._services.beginning:
                await asyncio.sleep(0)
            graph = self._services.graphs.get(run.graph_id)
            if graph is None:
                return self._failed(
                    "GraphNotFound", f"This executor does not serve the graph {run.graph_id!r}."
                )
            config = build_config(
                run, self._saver, [self._watch] if self._spans is None else [self._watch, self._spans]
            )
            try:
                wish = config["configurable"].get(CONFIG_KEY)
                sandbox.choose_template(self._services.templates.of_run(run.graph_id, wish))
            except TemplateRefused as error:
                return self._failed("TemplateRefused", error.message)
            config["configurable"][LEDGER_KEY] = self._ledger
            async with graph.open(config) as compiled:
                if run.kind == "update_state":
                    return await self._update_state(compiled, config)
                self._prepared = time.monotonic()
                tracing.past("prepare", self._base)
                try:
                    await self._stream(compiled, config, stream)
                except (asyncio.CancelledError, Exception) as error:
                    with suppress(Exception):  # a courtesy: how the run ended is what counts
                        if self._stop is None and not _is_ours(error):
                            await self._head_state(compiled)
                        elif self._stop in (Stop.INTERRUPT, Stop.TIMEOUT) and not _is_ours(error):
                            # Its values have what part of a step has written, which whoever goes on may discard.
                            self._asked = interrupts_by_task(await self._newest_state(compiled))
                    raise
                ending = await self._succeeded(compiled)
                if self._head_next:
                    await kept_workspace.keep(sandbox, run.fence, self.lease, self._services.pool)
                return ending
        except (asyncio.CancelledError, SystemExit, KeyboardInterrupt, Exception) as error:
            if self._stop is not None:
                return self._broken_off()
            if _is_ours(error):
                # Another attempt has the run already, or goes on from the newest checkpoint when the lease runs out. What the
                # graph still does is not wanted.
                self._stop = Stop.SUPERSEDED
                _log.warning("run given up by this attempt: %s", error.code, extra=self._ids())
                return None
            return self._failed(type(error).__name__, str(error), stage=self._stage_of(error))

    async def _stream(
        self, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, stream: RunStream
    ) -> None:
        run = self.run
        kept = durability(run) != "exit"
        modes = graph_modes(self._requested)
        nested: bool = run.kwargs.get("stream_subgraphs") or False
        standing = await breakpoints.reached(run, self._saver, graph, config)
        if "" in standing:
            return
        given = await input_of_attempt(run, self._saver, graph, config)
        self._saver.stop_at(standing)
        if kept:
            self._saver.pair_with_states(str(run.thread_id))
        events = graph.astream(
            given,
            config,
            context=run.kwargs.get("context"),
            stream_mode=cast(Any, list(modes | {"checkpoints"} if kept else modes)),
            interrupt_before=run.kwargs.get("interrupt_before") or None,
            interrupt_after=run.kwargs.get("interrupt_after") or None,
            durability=durability(run),
            subgraphs=True,
        )
        async for namespace, mode, payload in cast(Any, events):
            if mode == "checkpoints" and kept:
                await self._keep_snapshot(namespace, payload)
            if mode not in modes or (namespace and not nested):
                continue
            suffix = "".join(f"|{part}" for part in namespace)
            if mode == "messages":
                message, metadata = payload
                for name, data in self._messages.events(message, metadata, suffix):
                    stream.emit(name, to_json(data), journalled=False)
            else:
                stream.emit(mode + suffix, to_json(payload), journalled=mode not in _UNJOURNALLED)
                if (
                    stream.crowded
                ):  # PostgreSQL is away or slow: the graph takes no further step until it has caught up
                    await stream.drain()

    async def _keep_snapshot(self, namespace: tuple[str, ...], payload: dict[str, Any]) -> None:
        """Keep the state that LangGraph tells of. The thread's own is committed with its checkpoint: no reader ever sees an
        older one, whoever ends the run. The graph's next tasks begin when this returns."""
        rows = payload_rows(
            str(self.run.thread_id),
            self.run.fence.key.run_id,
            payload,
            self._known_blobs,
            self._saver.take_writes(*_parent(payload)),
        )
        if namespace:
            self._in_passing = True
            self._services.writer.submit(self.run.fence, rows)
            return
        checkpoint_id = payload["config"]["configurable"]["checkpoint_id"]
        await self._saver.write_state(checkpoint_id, rows)
        self._head_id = checkpoint_id
        self._head_next = payload["next"]

    async def _succeeded(self, graph: Pregel[Any, Any, Any, Any]) -> Ending:
        """The graph has returned. If something is left to do, it was interrupted."""
        if self._head_next is None or self._head_next:
            self._head_next = (await self._head_state(graph)).next
        else:
            self._asked = {}
        return self._ended(
            "success",
            thread_status="interrupted" if self._head_next else "idle",
            output={"checkpoint_id": self._head_id, "interrupts": self._asked},
        )

    async def _newest_state(self, graph: Pregel[Any, Any, Any, Any]) -> StateSnapshot:
        return await graph.aget_state(head_config(self.run, self._saver))

    async def _head_state(self, graph: Pregel[Any, Any, Any, Any]) -> StateSnapshot:
        """Read the newest state, which says what interrupted the graph, and keep it as a snapshot."""
        state = await self._newest_state(graph)
        self._head_id = state.config.get("configurable", {}).get("checkpoint_id")
        self._asked = interrupts_by_task(state)
        if self._head_id is not None:
            rows = state_rows(str(self.run.thread_id), self.run.fence.key.run_id, state, self._known_blobs)
            await self._services.writer.write(self.run.fence, rows)
        return state

    async def _update_state(self, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> Ending:
        kwargs = self.run.kwargs
        updated = await graph.aupdate_state(config, kwargs.get("values"), as_node=kwargs.get("as_node"))
        state = await self._head_state(graph)
        checkpoint = {
            "thread_id": str(self.run.thread_id),
            "checkpoint_ns": updated["configurable"].get("checkpoint_ns", ""),
            "checkpoint_id": updated["configurable"]["checkpoint_id"],
        }
        return self._ended(
            "success",
            thread_status="interrupted" if state.next else "idle",
            output={
                "checkpoint": checkpoint,
                "configurable": checkpoint,
                "checkpoint_id": checkpoint["checkpoint_id"],
            },
        )

    def _broken_off(self) -> Ending | None:
        """How a run ends that the executor stopped; None when it goes on elsewhere."""
        if self._stop in (Stop.SUPERSEDED, Stop.HAND_OVER, Stop.NO_ROOM):
            return None
        if self._stop is Stop.TIMEOUT:
            return self._failed(
                "RunTimeout",
                f"The run exceeded its limit of {self.run.timeout_s:g} s.",
                status="timeout",
                stage="timeout",
            )
        rollback = self._stop is Stop.ROLLBACK
        return self._ended(
            "interrupted",
            thread_status=None if rollback else "interrupted",
            output={"checkpoint_id": self._head_id, "interrupts": {}},
            rollback=rollback,
        )

    def _stage_of(self, error: BaseException) -> Stage:
        if self._prepared is None and self.run.kind == "run":
            return "prepare"
        return of_graph_error(error, model=self._watch.error, tool=self._ledger.error)

    def _failed(self, error: str, message: str, status: str = "error", stage: Stage = "prepare") -> Ending:
        self._failed_at = stage
        return self._ended(
            status,
            error={"error": error, "message": message},
            # An update that fails leaves the thread as it was.
            thread_status="error" if self.run.kind == "run" else None,
            output={"checkpoint_id": self._head_id, "interrupts": {}},
        )

    def _ended(
        self,
        status: str,
        *,
        thread_status: str | None,
        output: Any,
        error: Any = None,
        rollback: bool = False,
    ) -> Ending:
        def moment(monotonic: float | None) -> Any:
            return at(self.run.claimed_at, None if monotonic is None else monotonic - self._base)

        partial = self._messages.partial() if status != "success" else None
        return Ending(
            status=cast(Any, status),
            events="",
            error=to_json(error).decode() if error is not None else None,
            output=to_json(output).decode(),
            partial=to_json(partial).decode() if partial else None,
            thread_status=thread_status,
            interrupts=None if self._asked is None else to_json(self._asked).decode(),
            rollback=rollback,
            prepared_at=moment(self._prepared),
            first_model_request_at=moment(self._watch.first_model_request),
            first_output_at=moment(self._watch.first_output),
        )

    async def _finish(self, stream: RunStream, ending: Ending) -> ReadyRuns | None:
        """The terminal transaction, tried until PostgreSQL answers. None: another attempt, or the run's end, came first."""
        await self._settle(stream)
        names = [("error", ending.error)] if ending.error is not None else []
        names.append(("end", "null"))
        first = stream.reserve(len(names))
        events = [(first + i, name, data) for i, (name, data) in enumerate(names)]
        ending = replace(ending, events=to_json(events).decode())
        while True:
            try:
                mine, ready = await self._services.finisher.finish(self.run.fence, ending)
                break
            except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout):
                # Also when the lease is lost: if the reply was, renewals find no running run any more.
                await asyncio.sleep(_FINISH_PAUSE_S)
        if not mine:
            return None
        self._over = True
        stream.append_committed([(seq, name, data.encode()) for seq, name, data in events])
        return ready

    async def _settle(self, stream: RunStream) -> None:
        """Wait for what was written in passing, and when the run was broken off. Once it is given away its fence holds no
        longer, and the last events, states, steps and model calls would be lost."""
        self._watch.close()
        await stream.drain()
        with suppress(SandfleetError):  # then another attempt goes on from the checkpoint before
            await self._saver.write_held()
        with suppress(SandfleetError):
            await self.usage.settle()
        if self._in_passing or self._stop is not None:
            await self._services.writer.drain()

    async def _sandbox_token(self) -> str:
        """A token that holds no longer than the lease, on the database's clock; waits while the lease is in doubt."""
        if not self._over:  # nobody else takes a run that is over, and renewals take its lease for lost
            await self.lease.certain()
        expires_at = self.run.claimed_at.timestamp() + (self.lease.deadline - self._base)
        return sign(self._services.settings.host_secret, self.run.fence, expires_at)

    async def _wait_for_room(self, stream: RunStream) -> None:
        """Break the run off at its newest checkpoint: it waits for room at a gate, and holds no slot.

        Not within a tool's body: what that has done cannot be undone, and it would be broken off for good. So tools that
        need the sandbox get it before they begin, and others see NoRoom. For the same reason tools beside are awaited.
        """
        if running_call.get(None) is None:
            while self._ledger.bodies:  # noqa: ASYNC110 - they end in any thread
                await asyncio.sleep(_LOOK_AGAIN_S)
            if self._stop is None:
                waits = {"for": "room", "message": "No sandbox host has room. The run goes on when one has."}
                stream.emit("waiting", to_json(waits), journalled=True)
                self.stop(Stop.NO_ROOM)
            await asyncio.Event().wait()  # until the cancellation arrives

    def _ids(self) -> dict[str, str]:
        return {"run_id": str(self.run.fence.key.run_id), "tenant": self.run.fence.key.tenant}


def _is_ours(error: BaseException) -> TypeGuard[SandfleetError]:
    """Whether this attempt is over, and not the run: the lease is lost, also where a sandbox's host was the first to know,
    or the executor stops. Whatever else is raised ends the run: the next attempt would come to the same."""
    return isinstance(error, Superseded | ExecutorStopped)


async def _undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` to its end, whatever cancels the caller meanwhile: there is nothing left to break off."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


def _parent(payload: dict[str, Any]) -> tuple[str, str]:
    """Namespace and id of the checkpoint that comes before the payload's; an empty id when there is none."""
    parent: dict[str, Any] = (payload["parent_config"] or {}).get("configurable", {})
    return parent.get("checkpoint_ns", ""), parent.get("checkpoint_id", "")
