"""LangGraph's checkpointer on our tables: one row per checkpoint, written through the process's fenced writer.

The newest checkpoint is the one with the highest database sequence. Ids carry the clocks of hosts and decide nothing.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import orjson
import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph._internal._constants import NULL_TASK_ID
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import ERROR, RESUME
from langgraph.errors import GraphInterrupt
from psycopg import AsyncConnection
from psycopg_pool import PoolTimeout

from sandfleet.fleet.executor import checkpoint_maintenance
from sandfleet.fleet.executor.blocking_saver import BlockingSaver
from sandfleet.fleet.executor.fenced_rows import ChannelBlobRow, CheckpointRow, PendingWritesRow, Row
from sandfleet.fleet.executor.fenced_writer import FencedWriter, RowRefused
from sandfleet.fleet.executor.serializer import TolerantSerializer
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import SandfleetError, Superseded
from sandfleet.shared.fault_points import reach
from sandfleet.shared.ids import Fence, Owner
from sandfleet.shared.json_text import contains, to_json
from sandfleet.shared.store.copying import CHECKPOINTS, copy_rows

T = TypeVar("T")

_log = logging.getLogger(__name__)

INLINE_BYTES = 16 * 1024
"""Serialised channel values up to this size are in the checkpoint's own row; larger ones are stored once per version."""

_SERIALIZER = TolerantSerializer()
_REMEMBERED_NAMESPACES = 64
_PAGE = 50
_PAUSE_S = 0.5
_COLUMNS = {"thread_id": "thread_id", "checkpoint_ns": "ns", "checkpoint_id": "checkpoint_id"}
# An answer that names no question waits here, by no task, for the first one that asks; LangGraph leaves it here. Once a
# task of the same run has stored an answer it is spent: loaded again, it would answer the next question, too.
_SELECT = f"""
select c.seq, c.thread_id, c.ns, c.checkpoint_id, c.parent_id, c.metadata, c.blobs, c.type, c.body,
       w.task_ids, w.paths, w.slots, w.types, w.bodies, b.channels, b.types, b.bodies
from checkpoints c
left join lateral (
  select array_agg(task_id) task_ids, array_agg(path) paths, array_agg(slot) slots, array_agg(type) types,
         array_agg(body) bodies
  from checkpoint_writes w
  where w.tenant = c.tenant and w.user_id = c.user_id and w.thread_id = c.thread_id and w.ns = c.ns
    and w.checkpoint_id = c.checkpoint_id and not (w.task_id = '{NULL_TASK_ID}' and w.slot = {WRITES_IDX_MAP[RESUME]} and exists (
      select 1 from checkpoint_writes a where a.tenant = w.tenant and a.user_id = w.user_id and a.thread_id = w.thread_id
        and a.run_id = w.run_id and a.slot = {WRITES_IDX_MAP[RESUME]} and a.task_id <> '{NULL_TASK_ID}'))) w on true
left join lateral (
  select array_agg(b.channel) channels, array_agg(b.type) types, array_agg(b.body) bodies
  from json_each_text(c.blobs) named
  join checkpoint_blobs b on b.tenant = c.tenant and b.user_id = c.user_id and b.thread_id = c.thread_id
    and b.ns = c.ns and b.channel = named.key and b.version = named.value) b on true
where c.tenant = %s and c.user_id = %s and (%s::bigint is null or c.seq < %s)
"""
_BEFORE = """ and c.seq < (select s.seq from checkpoints s where s.tenant = c.tenant and s.user_id = c.user_id
 and s.thread_id = c.thread_id and s.ns = c.ns and s.checkpoint_id = %s)"""


class _Stored(NamedTuple):
    """A channel value as it is stored: inline (``body``) or in ``checkpoint_blobs`` under ``blob``."""

    version: str | int | float
    blob: str | None
    type: str
    body: bytes


class _Remembered(NamedTuple):
    """What the newest checkpoint that was read or written in a namespace holds, for the child that comes next."""

    checkpoint_id: str
    channels: dict[str, _Stored]


class FencedSaver(BlockingSaver):
    """The checkpointer of one run of one owner; cheap, made per run.

    With a ``fence`` every write names the run and its attempt, and raises Superseded once another attempt or the end of
    the run came first; with None writes are not fenced (offline tools). ``head_known_empty`` says that the thread that is
    used first has no checkpoints yet, so that nothing is asked of the database before this saver has written to it.
    """

    def __init__(
        self,
        writer: FencedWriter,
        pool: Pool,
        owner: Owner,
        fence: Fence | None,
        head_known_empty: bool = False,
        *,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde or _SERIALIZER, loop=writer.loop)
        self._writer = writer
        self._pool = pool
        self._owner = owner
        self._fence = fence
        # Shared with the shallow copies that `with_allowlist` makes.
        self._known_empty: dict[str | None, set[str]] = {None: set()} if head_known_empty else {}
        """Namespaces written to, of the thread that was empty; under None until its id is known."""
        self._remembered: dict[tuple[str, str], _Remembered] = {}
        self._writes: dict[tuple[str, str], dict[str, list[tuple[str, Any]]]] = {}
        """What tasks have written, by namespace and checkpoint, until `take_writes`."""
        self._pairs: list[str] = []
        """The thread whose own checkpoints are written together with their states, if any."""
        self._held: dict[str, list[Row]] = {}
        """By id, what waits to be written: checkpoints for their states, and states for their checkpoints."""
        self._states: dict[str, Sequence[Row]] = {}
        self._stops: set[str] = set()
        """Namespaces of graphs in nodes that go no further."""

    # --- writing ---------------------------------------------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint; returns when it is committed, unless it waits for its state. Raises Superseded, RowRefused
        or ExecutorStopped."""
        configurable = config["configurable"]
        thread_id, ns = str(configurable["thread_id"]), configurable.get("checkpoint_ns", "")
        checkpoint_id, parent_id = checkpoint["id"], configurable.get("checkpoint_id")
        channels = self._store_channels(thread_id, ns, parent_id, checkpoint, new_versions)
        rows: list[Row] = [
            ChannelBlobRow(thread_id, ns, channel, checkpoint_id, stored.type, stored.body)
            for channel, stored in channels.items()
            if stored.blob == checkpoint_id and stored.body
        ]
        blobs = {channel: stored.blob for channel, stored in channels.items() if stored.blob}
        inline = {c: (s.type, s.body) for c, s in channels.items() if not s.blob}
        body_type, body = self.serde.dumps_typed({**checkpoint, "channel_values": inline})
        full_metadata = get_checkpoint_metadata(config, metadata)
        rows.append(
            CheckpointRow(
                thread_id,
                ns,
                checkpoint_id,
                parent_id,
                self._fence.key.run_id if self._fence else _uuid(full_metadata.get("run_id")),
                to_json(full_metadata),
                orjson.dumps(blobs) if blobs else None,
                body_type,
                body,
            )
        )
        if (written := self._written_if_known_empty(thread_id)) is not None:
            written.add(ns)
        if ns == "" and thread_id in self._pairs:
            self._held[checkpoint_id] = rows
            if checkpoint_id in self._states:
                await self.write_held()
        else:
            await self._write_checkpoint(rows)
        self._remember(
            thread_id,
            ns,
            checkpoint_id,
            {c: s._replace(body=b"") if s.blob else s for c, s in channels.items()},
        )
        return _config(thread_id, ns, checkpoint_id)

    def _store_channels(
        self,
        thread_id: str,
        ns: str,
        parent_id: str | None,
        checkpoint: Checkpoint,
        new_versions: ChannelVersions,
    ) -> dict[str, _Stored]:
        """Serialise the values that changed since the parent; the others are stored as they were."""
        parent = self._remembered.get((thread_id, ns))
        before = parent.channels if parent and parent.checkpoint_id == parent_id else {}
        channels: dict[str, _Stored] = {}
        for channel, value in checkpoint["channel_values"].items():
            version = checkpoint["channel_versions"].get(channel, 0)
            stored = before.get(channel)
            if stored is None or stored.version != version or channel in new_versions:
                value_type, body = self.serde.dumps_typed(value)
                large = len(body) > INLINE_BYTES and "\x00" not in channel
                stored = _Stored(version, checkpoint["id"] if large else None, value_type, body)
            channels[channel] = stored
        return channels

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task at a checkpoint; returns when they are committed. Raises as ``aput``.

        A task that was broken off leaves nothing. LangGraph would keep what it had written up to there, and whoever goes on
        from the checkpoint would take that for the whole: without the edges that are chosen last, the graph just ends.
        """
        configurable = config["configurable"]
        ns, checkpoint_id = configurable.get("checkpoint_ns", ""), configurable["checkpoint_id"]
        if any(channel == ERROR and isinstance(value, asyncio.CancelledError) for channel, value in writes):
            return
        at = (str(configurable["thread_id"]), ns, checkpoint_id, task_id)
        self._writes.setdefault((ns, checkpoint_id), {})[task_id] = list(writes)
        slots: dict[int, list[tuple[str, Any]]] = {}
        for channel, value in writes:
            slot = WRITES_IDX_MAP.get(channel, 0)
            if slot:
                slots[slot] = [(channel, value)]
            else:
                slots.setdefault(0, []).append((channel, value))
        await self._writer.write(
            self._fence or self._owner,
            [
                PendingWritesRow(*at, slot, task_path, *self.serde.dumps_typed(pairs))
                for slot, pairs in slots.items()
            ],
        )

    async def _write_checkpoint(self, rows: Sequence[Row]) -> None:
        reach("checkpoint.before")
        await self._writer.write(self._fence or self._owner, rows)
        reach("checkpoint.committed")

    def pair_with_states(self, thread_id: str) -> None:
        """From now on write each checkpoint of the thread itself, not of its subgraphs, together with its state, which the
        caller gives to `write_state`. LangGraph begins no task behind a checkpoint before it has handed the state out."""
        self._pairs.append(thread_id)

    async def write_state(self, checkpoint_id: str, state: Sequence[Row]) -> None:
        """Write a state in one transaction with its checkpoint, at once if that is here; else when that comes, or anything
        is read or written next: it was there before. Raises as ``aput``."""
        self._states[checkpoint_id] = state
        if checkpoint_id in self._held:
            await self.write_held()

    async def write_held(self) -> None:
        """Write all that waits. Raises as ``aput``."""
        checkpoints = [row for rows in self._held.values() for row in rows]
        states = [row for rows in self._states.values() for row in rows]
        self._held.clear()
        self._states.clear()
        try:
            if checkpoints:
                await self._write_checkpoint([*checkpoints, *states])
            elif states:
                await self._writer.write(self._fence or self._owner, states)
        except RowRefused:
            if not (checkpoints and states):
                raise
            # Readers can do without the state, the run not without its checkpoint.
            await self._write_checkpoint(checkpoints)

    async def has_stored_command(self, thread_id: str) -> bool:
        """Whether this run has stored what it was told beside its input, for LangGraph to go on from."""
        assert self._fence is not None
        found = await self._rows(
            b"select 1 from checkpoint_writes where tenant = %s and user_id = %s and thread_id = %s and ns = ''"
            b" and task_id = %s and run_id = %s limit 1",
            [*self._owner, thread_id, NULL_TASK_ID, self._fence.key.run_id],
        )
        return bool(found)

    def take_writes(self, ns: str, checkpoint_id: str) -> dict[str, list[tuple[str, Any]]]:
        """What the tasks of a checkpoint have written through this saver, (channel, value) by task; once."""
        return self._writes.pop((ns, checkpoint_id), {})

    # --- reading ---------------------------------------------------------------------------------------------------

    def stop_at(self, namespaces: set[str]) -> None:
        """From now on interrupt the graphs of these namespaces, of nodes, where they would begin; those beside them go on."""
        self._stops |= namespaces

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that ``config`` names, or the newest one of its thread and namespace. Raises GraphInterrupt for the
        newest one of a namespace that was given to `stop_at`."""
        configurable = config["configurable"]
        thread_id, ns = str(configurable["thread_id"]), configurable.get("checkpoint_ns", "")
        checkpoint_id = configurable.get("checkpoint_id")
        if ns in self._stops and not checkpoint_id:
            raise GraphInterrupt  # as the graph itself did when it came there
        written = self._written_if_known_empty(thread_id)
        if written is not None and ns not in written:
            return None
        where, parameters = " and c.thread_id = %s and c.ns = %s", [thread_id, ns]
        if checkpoint_id:
            where += " and c.checkpoint_id = %s"
            parameters.append(str(checkpoint_id))
        return await anext(self._select(where, parameters, limit=1), None)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Checkpoints of this owner, newest first; ``filter`` must be contained in the metadata."""
        where, parameters = "", []
        configurable = config["configurable"] if config else {}
        for name, column in _COLUMNS.items():
            value = configurable.get(name)
            if value or (value is not None and name == "checkpoint_ns"):
                where += f" and c.{column} = %s"
                parameters.append(str(value))
        if before and before["configurable"].get("checkpoint_id"):
            where += _BEFORE
            parameters.append(str(before["configurable"]["checkpoint_id"]))
        async for found in self._select(where, parameters, limit=limit, filter=filter):
            yield found

    async def _select(
        self,
        where: str,
        parameters: Sequence[str],
        *,
        limit: int | None,
        filter: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Checkpoints newest first. The filter is applied here: PostgreSQL cannot look into JSON that holds U+0000."""
        if any("\x00" in parameter for parameter in parameters):
            return
        query = f"{_SELECT}{where} order by c.seq desc limit %s".encode()
        found, last_seq = 0, None
        page = _PAGE if filter or limit is None else limit
        while limit is None or found < limit:
            rows = await self._rows(query, [*self._owner, last_seq, last_seq, *parameters, page])
            for row in rows:
                last_seq = row[0]
                if filter and not contains(row[5], filter):
                    continue
                yield self._tuple(row)
                found += 1
                if found == limit:
                    return
            if len(rows) < page:
                return

    async def _rows(self, query: bytes, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Ask until PostgreSQL answers: its absence is a pause of the run, as it is for writes, and no error of the
        graph's. Whoever breaks the run off cancels this."""
        await self.write_held()
        while True:
            try:
                async with self._pool.connection() as connection:
                    return await (await connection.execute(query, parameters, binary=True)).fetchall()
            except (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, OSError) as error:
                _log.warning("reading checkpoints failed, trying again: %s", type(error).__name__)
                await asyncio.sleep(_PAUSE_S)

    def _tuple(self, row: Sequence[Any]) -> CheckpointTuple:
        _, thread_id, ns, checkpoint_id, parent_id, metadata, blobs, body_type, body = row[:9]
        checkpoint: Checkpoint = self.serde.loads_typed((body_type, body))
        versions = checkpoint["channel_versions"]
        channels = {
            channel: _Stored(versions.get(channel, 0), None, *stored)
            for channel, stored in checkpoint["channel_values"].items()
        }
        values = {channel: self.serde.loads_typed((s.type, s.body)) for channel, s in channels.items()}
        large = {channel: typed for channel, *typed in _rows(row[14:17])}
        for channel, blob in (blobs or {}).items():
            if channel not in large:
                raise SandfleetError(f"Checkpoint {checkpoint_id} has lost the value of a channel.")
            blob_type, blob_body = large[channel]
            channels[channel] = _Stored(versions.get(channel, 0), blob, blob_type, b"")
            values[channel] = self.serde.loads_typed((blob_type, blob_body))
        checkpoint["channel_values"] = values
        self._remember(thread_id, ns, checkpoint_id, channels)
        writes = sorted(_rows(row[9:14]), key=lambda w: writes_sort_key(w[1], w[0], w[2]))
        return CheckpointTuple(
            _config(thread_id, ns, checkpoint_id),
            checkpoint,
            metadata,
            _config(thread_id, ns, parent_id) if parent_id else None,
            [
                (task_id, channel, value)
                for task_id, _, _, writes_type, writes_body in writes
                for channel, value in self.serde.loads_typed((writes_type, writes_body))
            ],
        )

    # --- whole threads and runs ------------------------------------------------------------------------------------

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete all checkpoints of a thread of this owner."""
        async with self._transaction() as connection:
            await checkpoint_maintenance.delete_threads(connection, self._owner, [str(thread_id)])

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that these runs wrote. Ids that are not UUIDs name no run."""
        ids = [run_id for text in run_ids if (run_id := _uuid(text))]
        async with self._transaction() as connection:
            await checkpoint_maintenance.delete_for_runs(connection, self._owner, ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints of a thread to another thread of this owner, in their order."""
        async with self._transaction() as connection:
            await copy_rows(
                connection, self._owner, str(source_thread_id), str(target_thread_id), CHECKPOINTS
            )

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep the newest checkpoint per namespace (``keep_latest``) or none (``delete``). Where channels are stored as
        differences, the ancestors of the newest one stay too."""
        if strategy not in ("keep_latest", "delete"):
            raise ValueError(f"Unknown prune strategy {strategy!r}: use keep_latest or delete.")
        ids = [str(thread_id) for thread_id in thread_ids]
        async with self._transaction() as connection:
            if strategy == "delete":
                await checkpoint_maintenance.delete_threads(connection, self._owner, ids)
            else:
                await checkpoint_maintenance.keep_latest(connection, self._owner, ids)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection[Any]]:
        """A transaction under this saver's fence. Forgets what was known of the threads."""
        await self.write_held()
        self._known_empty.clear()
        self._remembered.clear()
        async with self._pool.connection() as connection, connection.transaction():
            if self._fence:
                cursor = await connection.execute(
                    "select 1 from runs where tenant = %s and user_id = %s and run_id = %s and attempt = %s"
                    " and status = 'running' for share",
                    (*self._fence.key, self._fence.attempt),
                )
                if await cursor.fetchone() is None:
                    raise Superseded("Another attempt, or the end of the run, came first.")
            yield connection

    # --- what is remembered ----------------------------------------------------------------------------------------

    def _remember(self, thread_id: str, ns: str, checkpoint_id: str, channels: dict[str, _Stored]) -> None:
        self._remembered.pop((thread_id, ns), None)
        self._remembered[thread_id, ns] = _Remembered(checkpoint_id, channels)
        if len(self._remembered) > _REMEMBERED_NAMESPACES:
            del self._remembered[next(iter(self._remembered))]

    def _written_if_known_empty(self, thread_id: str) -> set[str] | None:
        """The namespaces that this saver, the only writer of the thread, has written to; None for any other thread."""
        if None in self._known_empty:
            self._known_empty[thread_id] = self._known_empty.pop(None)
        return self._known_empty.get(thread_id)


def _config(thread_id: str, ns: str, checkpoint_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def _rows(columns: Sequence[Sequence[Any] | None]) -> Iterator[tuple[Any, ...]]:
    """Rows from the parallel arrays of an aggregate; none from the nulls of an empty one."""
    return zip(*(column or () for column in columns), strict=True)


def _uuid(text: object) -> uuid.UUID | None:
    try:
        return uuid.UUID(str(text))
    except ValueError:
        return None
