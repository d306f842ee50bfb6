"""A database that an older release has left in the middle of its work is brought to the newest schema, and this version goes on.

``rows_NNNN.sql`` is what `write_rows.py` wrote when that release ran it at revision NNNN: runs that have ended, wait, are
interrupted and were at work when their executor and their host were killed.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from psycopg import sql

from sandfleet.localstack.deployment_check import check_stack
from sandfleet.localstack.servers import database_url
from sandfleet.localstack.stack import Stack
from sandfleet.shared.db import migrate
from tests.fixtures_servers import TestServers
from tests.fixtures_stack import start_stack
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

REVISIONS = ("0006", "0011")
"""Newest revisions of the releases that are upgraded from: the oldest that has its rows here, and the last one."""

Tables = dict[str, list[str]]

_TIMES = """
select table_name::text, string_agg(format('%%1$I = %%1$I + %%2$L::interval', column_name, %s::interval), ', ') from information_schema.columns
  where table_schema = 'public' and data_type = 'timestamp with time zone' group by table_name
"""


async def load(connection: psycopg.AsyncConnection[Any], revision: str) -> None:
    """The release's rows, as if it had been killed ten minutes ago."""
    await connection.execute((Path(__file__).parent / f"rows_{revision}.sql").read_bytes())
    await connection.execute("set search_path = public")
    row = await (
        await connection.execute(
            "select clock_timestamp() - max(heartbeat_at) - interval '10 min' from hosts"
        )
    ).fetchone()
    assert row is not None
    for table, moved in await (await connection.execute(_TIMES, row)).fetchall():
        await connection.execute(f"update {table} set {moved}".encode())
    await connection.execute(
        "update deployment set deployment_id = gen_random_uuid()"
    )  # tests may share an engine


async def read_tables(connection: psycopg.AsyncConnection[Any], columns: dict[str, list[str]]) -> Tables:
    """All rows by table, with those columns only, as texts."""
    found = {}
    for table, names in columns.items():
        listed = sql.SQL(", ").join(map(sql.Identifier, names))
        rows = await connection.execute(
            sql.SQL("select ({})::text from {} t").format(
                sql.SQL("row({})").format(listed), sql.Identifier(table)
            )
        )
        found[table] = sorted(text for (text,) in await rows.fetchall())
    return found


async def read_columns(connection: psycopg.AsyncConnection[Any]) -> dict[str, list[str]]:
    """Names of columns by table."""
    rows = await connection.execute(
        """select table_name::text, array_agg(column_name::text order by ordinal_position) from information_schema.columns
             where table_schema = 'public' and table_name <> 'alembic_version' group by table_name"""
    )
    return dict(await rows.fetchall())


class Upgraded(NamedTuple):
    """The rows before and after, and a stack of this version on them."""

    before: Tables
    after: Tables
    stack: Stack
    client: LangGraphClient

    async def thread(self, name: str) -> str:
        """Id of the thread that `write_rows.py` calls so."""
        (found,) = await self.client.threads.search(metadata={"name": name})
        return found["thread_id"]

    async def values(self, name: str) -> dict[str, Any]:
        """State of a thread, as soon as all its runs have ended well."""
        thread_id = await self.thread(name)

        async def ended() -> bool:
            statuses = {run["status"] for run in await self.client.runs.list(thread_id)}
            assert statuses <= {"pending", "running", "success"}
            return statuses == {"success"}

        await eventually(ended, 180, f"the runs of {name} end")
        values: dict[str, Any] = (await self.client.threads.get_state(thread_id))["values"]
        return values


@pytest.fixture(scope="module", params=REVISIONS)
async def upgraded(
    request: pytest.FixtureRequest, servers: TestServers, engine: str
) -> AsyncIterator[Upgraded]:
    name = f"test_{uuid.uuid4().hex}"
    url = database_url(servers.admin_url, name)
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as admin:
        await admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    await asyncio.to_thread(migrate.upgrade, url, request.param)
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await load(connection, request.param)
        columns = await read_columns(connection)
        before = await read_tables(connection, columns)
        await asyncio.to_thread(migrate.upgrade, url)
        after = await read_tables(connection, columns)
    stack = await start_stack(engine, "upgraded", DATABASE_URL=url)
    try:
        async with get_client(url=stack.info.api_url, api_key=stack.info.api_key) as client:
            yield Upgraded(before, after, stack, client)
    finally:
        removed = await stack.stop()
        await servers.drop_database(url)
    assert removed == []


async def test_an_upgrade_keeps_every_row(upgraded: Upgraded) -> None:
    """As it was, in all columns that there were. Red when a revision drops or rewrites something."""
    empty = {
        "snapshots",
        "replaced_writes",
        "replaced_states",
        "assistant_versions",
        "checkpoint_blobs",
        "state_blobs",
        "scaling",
        "api_keys",
        "run_usage",
        "daily_usage",
    }
    assert {table for table, rows in upgraded.before.items() if not rows} <= empty
    assert upgraded.after == upgraded.before


async def test_pending_runs_are_finished(upgraded: Upgraded) -> None:
    """One that was ready, one that was delayed. Red when this version does not find them, or cannot read their input."""
    assert (await upgraded.values("pending"))["digest"] == expected_digest(3)
    assert (await upgraded.values("delayed"))["digest"] == expected_digest(2)


async def test_a_run_whose_executor_is_gone_is_taken_over(upgraded: Upgraded) -> None:
    """From its newest checkpoint and its ledger; then comes the run that waits for its thread. Red when a checkpoint or a call
    of the older version cannot be read, or a call that had finished is made again."""
    values = await upgraded.values("at work")
    assert [status for status, _ in values["results"]] == ["success", "error", "success", "success"]
    async with await psycopg.AsyncConnection.connect(upgraded.stack.info.database_url) as connection:
        rows = await connection.execute(
            """select name, c.attempt, c.status from tool_calls c join runs using (tenant, user_id, run_id)
                 where thread_id = %s order by c.started_at""",
            (await upgraded.thread("at work"),),
        )
        found = await rows.fetchall()
    assert found == [
        ("append", 1, "finished"),
        ("wait", 1, "orphaned"),
        ("append", 2, "finished"),
        ("append", 1, "finished"),
    ]


async def test_its_watchers_see_both_attempts(upgraded: Upgraded) -> None:
    """Red when the journal of the older version cannot be followed by that of this one."""
    await upgraded.values("at work")
    thread_id = await upgraded.thread("at work")
    run = (await upgraded.client.runs.list(thread_id))[-1]
    parts = [
        part async for part in upgraded.client.runs.join_stream(thread_id, run["run_id"], last_event_id="0")
    ]
    attempts = [part.data["attempt"] for part in parts if part.event == "metadata"]
    assert (attempts[0], attempts[-1]) == (1, 2)


async def test_a_run_whose_sandbox_is_gone_gets_another(upgraded: Upgraded) -> None:
    """Placed on a host that no longer answers. Red when its placement or its host's row cannot be read any more."""
    results = (await upgraded.values("commanding"))["results"]
    assert len(results) == 3
    assert "done" in results[0]
    assert "sandbox_lost" in results[2], results


async def test_interrupted_runs_are_resumed(upgraded: Upgraded) -> None:
    """One that asked in its graph, one that asked in a tool. Red when the interrupt is not found at the older checkpoint."""
    resume = {"resume": True}
    values = await upgraded.client.runs.wait(await upgraded.thread("interrupted"), "approve", command=resume)
    assert (values["asked"], values["answer"]) == (1, True)
    values = await upgraded.client.runs.wait(
        await upgraded.thread("interrupted call"), "effects", command=resume
    )
    assert values["results"] == [["success", "appended 0"], ["success", "appended 1"]]


async def test_what_was_submitted_before_is_not_submitted_again(upgraded: Upgraded) -> None:
    """Red when the older version's keys, or how it hashes requests, are forgotten."""
    thread_id = await upgraded.thread("pending")
    info = upgraded.stack.info
    async with httpx.AsyncClient(base_url=info.api_url, headers={"x-api-key": info.api_key}) as http:
        body = {"assistant_id": "counter", "input": {"steps": 3}}
        answer = await http.post(f"/threads/{thread_id}/runs", json=body, headers={"idempotency-key": "old"})
    runs = await upgraded.client.runs.list(thread_id)
    assert [run["run_id"] for run in runs] == [answer.json()["run_id"]]


async def test_a_sandbox_without_a_run_says_that_it_is_lost_and_goes_on(upgraded: Upgraded) -> None:
    """Red when its row or its placement cannot be read any more."""
    info = upgraded.stack.info
    async with httpx.AsyncClient(
        base_url=info.api_url, headers={"x-api-key": info.api_key}, timeout=120
    ) as http:
        (sandbox,) = (await http.post("/sandboxes/search", json={"metadata": {"name": "old"}})).json()
        path = f"/sandboxes/{sandbox['sandbox_id']}"
        told = await http.post(f"{path}/exec", json={"command": "echo there"})
        assert (told.status_code, told.json()["code"]) == (410, "sandbox_lost")
        done = await http.post(f"{path}/exec", json={"command": "echo there"})
        assert done.json()["stdout"] == "there\n"
        assert (await http.delete(path)).status_code == 204


async def test_no_rule_is_broken_in_the_end(upgraded: Upgraded) -> None:
    """Red when something of the older version is left that nobody closes."""
    for name in ("pending", "delayed", "at work", "commanding"):
        await upgraded.values(name)

    async def clean() -> bool:
        return (await check_stack(upgraded.stack.info)).violations == []

    try:
        await eventually(clean, 120, "no violation")
    except AssertionError:
        raise AssertionError((await check_stack(upgraded.stack.info)).violations) from None
