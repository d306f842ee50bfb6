"""The verdict on a session of chaos: everything that was accepted came to its right end, and nothing is left behind."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from sandfleet.localstack.stack import Stack
from tests.chaos.expected import Ended, commands_problems, effects_problems, thread_problems
from tests.chaos.logs import Journalled, stream_problems
from tests.chaos.submitters import Accepted, Record
from tests.chaos.workload import Commands

Rows = dict[str, dict[str, Any]]
Connection = psycopg.AsyncConnection[dict[str, Any]]

_PAGE = 500


async def verdict(stack: Stack, records: Sequence[Record], effects_file: Path) -> list[str]:
    """What is wrong, a line each; empty is a pass."""
    effects = Counter(effects_file.read_text().split()) if effects_file.exists() else Counter[str]()
    problems: list[str] = []
    async with await psycopg.AsyncConnection.connect(
        stack.info.database_url, autocommit=True, row_factory=dict_row
    ) as connection:
        for start in range(0, len(records), _PAGE):
            page = records[start : start + _PAGE]
            rows = await _rows(connection, page)
            values = await _values(connection, page)
            for record in page:
                problems += [
                    f"thread {record.thread_id}: {problem}"
                    for problem in _record_problems(record, rows, values.get(record.thread_id, {}), effects)
                ]
            problems += await _stream_problems(connection, page, rows)
            problems += await _superseded(connection, page)
    climbs = [climb for record in records for climb in record.thread.runs]
    return problems + effects_problems(effects, climbs)


def _record_problems(record: Record, rows: Rows, values: dict[str, Any], effects: Counter[str]) -> list[str]:
    problems = list(record.refused)
    ended = []
    for accepted in record.accepted:
        row = rows.get(accepted.run_id)
        status = row["status"] if row else None
        if status in ("pending", "running"):
            problems.append(f"{accepted.what.salt} never ended: {row}")
        elif isinstance(accepted.what, Commands):
            problems += _command_problems(accepted.what, status, row, values)
        else:
            ended.append(Ended(accepted.what, accepted.resumed, status, row["error"] if row else None))
            problems += _outcome_problems(accepted, status, values, alone=len(record.accepted) == 1)
    if ended and not problems:
        problems += thread_problems(ended, values, effects)
    return problems


def _command_problems(
    commands: Commands, status: str | None, row: dict[str, Any] | None, values: dict[str, Any]
) -> list[str]:
    if status != "success":
        return [f"{commands.salt} is {status}: {row}"]
    return commands_problems(commands, values.get("results", []))


def _outcome_problems(
    accepted: Accepted, status: str | None, values: dict[str, Any], *, alone: bool
) -> list[str]:
    """A request that waited for its run was told how it ended."""
    if accepted.outcome is None:
        return []
    if status == "error":
        return [] if "__error__" in accepted.outcome else [f"{accepted.what.salt}: {accepted.outcome}"]
    if alone and status == "success" and accepted.outcome.get("log") != values.get("log"):
        return [f"who waited for {accepted.what.salt} was told {accepted.outcome}, and the state is {values}"]
    return []


async def _rows(connection: Connection, records: Sequence[Record]) -> Rows:
    ids = [UUID(a.run_id) for record in records for a in record.accepted if a.run_id]
    cursor = await connection.execute(
        """select run_id::text, status, gate, attempt, deaths, lease_owner, error, cancel_action, not_before::text,
                  clock_timestamp()::text as now, lease_expires_at::text from runs where run_id = any(%s)""",
        (ids,),
    )
    return {row["run_id"]: row for row in await cursor.fetchall()}


async def _values(connection: Connection, records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The newest state of each thread. Large values are apart, and these are small."""
    cursor = await connection.execute(
        """select distinct on (thread_id) thread_id, "values" from state_snapshots
           where thread_id = any(%s) and ns = '' order by thread_id, seq desc""",
        ([record.thread_id for record in records],),
    )
    return {row["thread_id"]: row["values"] for row in await cursor.fetchall()}


async def _superseded(connection: Connection, records: Sequence[Record]) -> list[str]:
    """Checkpoints that an attempt wrote after its successor had written one: the digest shows only those that came last."""
    cursor = await connection.execute(
        """select run_id::text, attempt, later from (
             select run_id, attempt, max(attempt) over (
               partition by tenant, user_id, thread_id, ns, run_id order by seq) as later
             from checkpoints where thread_id = any(%s)) c
           where attempt < later""",
        ([record.thread_id for record in records],),
    )
    return [
        f"run {row['run_id']}: attempt {row['attempt']} wrote a checkpoint after attempt {row['later']} did"
        for row in await cursor.fetchall()
    ]


async def _stream_problems(connection: Connection, records: Sequence[Record], rows: Rows) -> list[str]:
    problems = []
    for record in records:
        for accepted in record.accepted:
            follower = accepted.follower
            if follower is None or (follower.gone and accepted.run_id not in rows):
                continue
            cursor = await connection.execute(
                "select attempt, seq, event, data from journal where run_id = %s order by attempt, seq",
                (UUID(accepted.run_id),),
            )
            journal = [Journalled(**row) for row in await cursor.fetchall()]
            problems += [
                f"stream of {accepted.what.salt} ({accepted.run_id}): {problem}"
                for problem in stream_problems(journal if accepted.run_id in rows else None, follower.seen)
            ]
    return problems
