"""The kinds of rows that a run writes while it runs, and the one statement that inserts any mix of them.

Arrays are packed here in PostgreSQL's binary format: half the CPU of psycopg's own list dumpers, and JSON that is UTF-8
already needs no decoding.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.adapt import Dumper
from psycopg.pq import Format

from sandfleet.shared.ids import Fence, Owner


class JournalRow(NamedTuple):
    """One journalled event; ``data`` is JSON in UTF-8."""

    seq: int
    event: str
    data: bytes


class CheckpointRow(NamedTuple):
    """One checkpoint. ``blobs`` is a JSON object {channel: version} of the values kept in ``checkpoint_blobs``."""

    thread_id: str
    ns: str
    checkpoint_id: str
    parent_id: str | None
    run_id: UUID | None
    metadata: bytes
    blobs: bytes | None
    type: str
    body: bytes


class ChannelBlobRow(NamedTuple):
    """One large channel value. ``version`` is the id of the checkpoint that wrote it first, so forks never clash."""

    thread_id: str
    ns: str
    channel: str
    version: str
    type: str
    body: bytes


class PendingWritesRow(NamedTuple):
    """Writes of one task: slot 0 holds all ordinary ones, a slot below 0 one write to a special channel."""

    thread_id: str
    ns: str
    checkpoint_id: str
    task_id: str
    slot: int
    path: str
    type: str
    body: bytes


class SnapshotRow(NamedTuple):
    """A thread's state at a checkpoint as JSON. ``refs`` names the values kept in ``state_blobs`` by hash (hex), and
    ``parent_results`` is what the tasks of the parent checkpoint came to, by their ids."""

    thread_id: str
    ns: str
    checkpoint_id: str
    run_id: UUID | None
    parent_id: str | None
    values: bytes
    refs: bytes
    next: bytes
    tasks: bytes
    parent_results: bytes
    metadata: bytes
    created_at: str


class StateBlobRow(NamedTuple):
    """One large value of a snapshot as JSON, named by its SHA-256."""

    thread_id: str
    hash: bytes
    body: bytes


class ToolCallRow(NamedTuple):
    """How one execution of a tool call stands; ``outcome`` says what ``body`` is."""

    call_id: UUID
    execution: int
    ns: str
    message_id: str | None
    tool_call_id: str | None
    name: str
    status: str
    outcome: str | None
    type: str | None
    body: bytes | None
    error: str | None


class UsageRow(NamedTuple):
    """What the attempt has used of one model so far, in absolute numbers. `shared.store.usage.Used` says what each is."""

    model: str
    calls: int
    unmetered_calls: int
    unpriced_calls: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_creation_tokens: int
    cost_usd: float


Row = (
    JournalRow
    | CheckpointRow
    | ChannelBlobRow
    | PendingWritesRow
    | SnapshotRow
    | StateBlobRow
    | ToolCallRow
    | UsageRow
)
Batch = Sequence[tuple[Fence | Owner, Sequence[Row]]]


class _Packed(bytes):
    """A parameter in PostgreSQL's binary format; its type comes from the cast in the statement."""


class _PackedDumper(Dumper):
    format = Format.BINARY
    oid = 0

    def dump(self, obj: _Packed) -> bytes:
        return obj


def register(connection: AsyncConnection[Any]) -> None:
    """Teach a connection the parameters that ``statement`` makes."""
    connection.adapters.register_dumper(_Packed, _PackedDumper)


_HEADER = struct.Struct("!iiIii")  # dimensions, has nulls, element type, length, lower bound
_LENGTH = struct.Struct("!i")
_NULL = _LENGTH.pack(-1)


def _pack(element_oid: int, values: Sequence[bytes | None]) -> _Packed:
    parts = [_HEADER.pack(1, 1 if None in values else 0, element_oid, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(_LENGTH.pack(len(value)))
            parts.append(value)
    return _Packed(b"".join(parts))


def _pack_numbers(element_oid: int, code: str, size: int) -> Callable[[Sequence[float]], _Packed]:
    def pack(values: Sequence[float]) -> _Packed:
        flat = [part for value in values for part in (size, value)]
        return _Packed(
            _HEADER.pack(1, 0, element_oid, len(values), 1)
            + struct.pack("!" + ("i" + code) * len(values), *flat)
        )

    return pack


_PACKERS: dict[str, Callable[[Sequence[Any]], _Packed]] = {
    "text": lambda values: _pack(
        25, [v.encode() if isinstance(v, str) else v for v in values]
    ),  # bytes: UTF-8 already
    "json": lambda values: _pack(114, values),
    "bytea": lambda values: _pack(17, values),
    "uuid": lambda values: _pack(2950, [None if v is None else v.bytes for v in values]),
    "int": _pack_numbers(23, "i", 4),
    "smallint": _pack_numbers(21, "h", 2),
    "bigint": _pack_numbers(20, "q", 8),
    "double precision": _pack_numbers(701, "d", 8),
}


@dataclass(frozen=True)
class _Kind:
    """How rows of one type are inserted. ``key`` are the leading columns that a repeated row is known by; with
    ``update`` a repeated row replaces the old one, else the old one stays; ``derived`` are columns set by expressions."""

    table: str
    row: type[NamedTuple]
    types: tuple[str, ...]
    key: tuple[str, ...]
    from_fence: tuple[str, ...] = ("tenant", "user_id")
    update: tuple[str, ...] = ()
    derived: str = ""

    def insert(self) -> str:
        columns = self.row._fields
        names = ", ".join((*self.from_fence, *(f'"{c}"' for c in columns)))
        selected = ", ".join((*(f"ok.{c}" for c in self.from_fence), *(f'u."{c}"' for c in columns)))
        arrays = ", ".join(f"%b::{t}[]" for t in ("int", *self.types))
        aliases = ", ".join(("n", *(f'"{c}"' for c in columns)))
        conflict = "nothing"
        if self.update:
            conflict = (
                "update set " + ", ".join(f'"{c}" = excluded."{c}"' for c in self.update) + self.derived
            )
        # Ordered, so that identity columns follow the order of submission.
        return (
            f"insert into {self.table} ({names}) select {selected}"
            f" from unnest({arrays}) with ordinality u ({aliases}, ordinal) join ok on ok.n = u.n order by u.ordinal"
            f" on conflict ({', '.join(self.key)}) do {conflict}"
        )


_THREAD = ("tenant", "user_id", "thread_id")
_CHECKPOINT = (*_THREAD, "ns", "checkpoint_id")
_KINDS: tuple[_Kind, ...] = (
    _Kind(
        "journal",
        JournalRow,
        ("int", "text", "text"),
        ("tenant", "user_id", "run_id", "attempt", "seq"),
        ("tenant", "user_id", "run_id", "attempt"),
    ),
    _Kind(
        "checkpoints",
        CheckpointRow,
        ("text", "text", "text", "text", "uuid", "json", "json", "text", "bytea"),
        _CHECKPOINT,
        ("tenant", "user_id", "attempt"),
        ("metadata", "blobs", "type", "body"),
    ),
    _Kind(
        "checkpoint_blobs",
        ChannelBlobRow,
        ("text", "text", "text", "text", "text", "bytea"),
        (*_THREAD, "ns", "channel", "version"),
    ),
    _Kind(
        "checkpoint_writes",
        PendingWritesRow,
        ("text", "text", "text", "text", "smallint", "text", "text", "bytea"),
        (*_CHECKPOINT, "task_id", "slot"),
        ("tenant", "user_id", "run_id"),
        ("run_id", "path", "type", "body"),
    ),
    _Kind(
        "state_snapshots",
        SnapshotRow,
        ("text", "text", "text", "uuid", "text", "json", "json", "json", "json", "json", "json", "text"),
        _CHECKPOINT,
        # A state that is read again, when it has ended the run, knows nothing of its parent.
        update=("run_id", "values", "refs", "next", "tasks", "metadata", "created_at"),
    ),
    _Kind("state_blobs", StateBlobRow, ("text", "bytea", "text"), (*_THREAD, "hash")),
    _Kind(
        "tool_calls",
        ToolCallRow,
        ("uuid", "smallint", *(("text",) * 7), "bytea", "text"),
        ("tenant", "user_id", "run_id", "call_id", "execution"),
        ("tenant", "user_id", "run_id", "attempt"),
        ("status", "outcome", "type", "body", "error"),
        """, attempt = case excluded.status when 'started' then excluded.attempt else tool_calls.attempt end,
             started_at = case excluded.status when 'started' then clock_timestamp() else tool_calls.started_at end,
             finished_at = case excluded.status when 'started' then null else clock_timestamp() end""",
    ),
    _Kind(
        "run_usage",
        UsageRow,
        ("text", *(("bigint",) * 7), "double precision"),
        ("tenant", "user_id", "run_id", "attempt", "model"),
        ("tenant", "user_id", "run_id", "attempt"),
        UsageRow._fields[1:],
    ),
)
_KIND_OF = {kind.row: number for number, kind in enumerate(_KINDS)}
_KEY_LENGTH = tuple(len(set(kind.key) & set(kind.row._fields)) if kind.update else 0 for kind in _KINDS)


@cache
def _sql(kinds: tuple[int, ...]) -> str:
    """The statement for these kinds of rows; few mixes are common, and each is prepared once per connection."""
    inserts = ", ".join(f"k{k} as ({_KINDS[k].insert()})" for k in kinds)
    return f"""
        with named as materialized (
          select * from unnest(%b::int[], %b::text[], %b::text[], %b::uuid[], %b::int[])
            f (n, tenant, user_id, run_id, attempt) order by tenant, user_id, run_id
        ), ok as materialized (
          select f.* from named f left join lateral (
            select r.status from runs r  -- the status is compared outside: it must not lead to an index of running runs
            where r.tenant = f.tenant and r.user_id = f.user_id and r.run_id = f.run_id
              and r.attempt = f.attempt for share) r on true
          where r.status = 'running' or f.run_id is null
        ), {inserts}
        select n from ok
        """


def statement(batch: Batch) -> tuple[str, list[bytes]]:
    """The statement that writes ``batch`` and its parameters; it returns the positions in ``fences(batch)`` that
    passed: fences whose run is running under that attempt, and bare owners, which are not fenced.

    A row that is repeated under the same fence is written once, as it was last. Raises UnicodeEncodeError or struct.error
    for a value that PostgreSQL has no bytes for.
    """
    positions = {who: n for n, who in enumerate(fences(batch))}
    numbers: list[list[int]] = [[] for _ in _KINDS]
    rows: list[list[Row]] = [[] for _ in _KINDS]
    places: dict[tuple[Any, ...], int] = {}
    for who, items in batch:
        n = positions[who]
        for row in items:
            kind = _KIND_OF[type(row)]
            if length := _KEY_LENGTH[kind]:
                key = (n, kind, *row[:length])
                place = places.setdefault(key, len(rows[kind]))
                if place < len(rows[kind]):
                    rows[kind][place] = row
                    continue
            numbers[kind].append(n)
            rows[kind].append(row)
    parameters: list[bytes] = _pack_fences(list(positions))
    present = tuple(k for k in range(len(_KINDS)) if rows[k])
    for k in present:
        parameters.append(_PACKERS["int"](numbers[k]))
        parameters.extend(
            _PACKERS[column_type](column)
            for column_type, column in zip(_KINDS[k].types, zip(*rows[k], strict=True), strict=True)
        )
    return _sql(present), parameters


def fences(batch: Batch) -> list[Fence | Owner]:
    """The different fences and owners of a batch, in order of appearance."""
    return list(dict.fromkeys(who for who, _ in batch))


def _pack_fences(all_fences: Sequence[Fence | Owner]) -> list[bytes]:
    owners = [who.key.owner if isinstance(who, Fence) else who for who in all_fences]
    return [
        _PACKERS["int"](range(len(all_fences))),
        _PACKERS["text"]([owner.tenant for owner in owners]),
        _PACKERS["text"]([owner.user_id for owner in owners]),
        _PACKERS["uuid"]([who.key.run_id if isinstance(who, Fence) else None for who in all_fences]),
        _PACKERS["int"]([who.attempt if isinstance(who, Fence) else 0 for who in all_fences]),
    ]
