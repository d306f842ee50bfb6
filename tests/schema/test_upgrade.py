"""The schema is brought to its newest revision beside processes that are at work, and by code that may be older than it."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from sandfleet.localstack.servers import database_url
from sandfleet.shared.db import migrate
from sandfleet.shared.errors import Unavailable
from tests.fixtures_servers import TestServers
from tests.waiting import eventually

Connection = psycopg.AsyncConnection[Any]


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as opened:
        yield opened


@pytest.fixture
async def released(servers: TestServers) -> AsyncIterator[str]:
    """URL of a database with the schema of the first release."""
    name = f"test_{uuid.uuid4().hex}"
    url = database_url(servers.admin_url, name)
    async with connected(servers.admin_url) as admin:
        await admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    await asyncio.to_thread(migrate.upgrade, url, "0001")
    yield url
    await servers.drop_database(url)


async def revision(connection: Connection) -> str:
    row = await (await connection.execute("select version_num from alembic_version")).fetchone()
    assert row is not None
    return str(row[0])


async def waits_for_tenants(connection: Connection) -> bool:
    """Whether somebody wants the whole table and waits."""
    cursor = await connection.execute(
        """select 1 from pg_locks where not granted and mode = 'AccessExclusiveLock' and relation = 'tenants'::regclass
             and database = (select oid from pg_database where datname = current_database())"""
    )
    return await cursor.fetchone() is not None


async def test_a_long_transaction_delays_an_upgrade_and_nobody_else(
    released: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red without a lock timeout: whoever comes after the upgrade waits behind it, for as long as that transaction lasts."""
    monkeypatch.setattr(migrate, "_TRIES", 1000)
    monkeypatch.setattr(migrate, "_PAUSE_S", 0.1)
    async with connected(released) as long, connected(released) as other:
        async with long.transaction():
            await long.execute("select 1 from tenants for update")
            upgrade = asyncio.create_task(asyncio.to_thread(migrate.upgrade, released))
            for _ in range(2):
                await eventually(lambda: waits_for_tenants(other), what="the upgrade waits for the table")
                await other.execute("set statement_timeout = '60 s'")
                await other.execute("select 1 from tenants for update")
            assert not upgrade.done()
        await upgrade
        assert await revision(other) > "0001"


async def test_an_upgrade_gives_up_after_some_tries(released: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what to do; the schema is as before. Red when it tries for ever, or fails with the database's words alone."""
    monkeypatch.setattr(migrate, "_TRIES", 1)
    async with connected(released) as long, connected(released) as other:
        async with long.transaction():
            await long.execute("select 1 from tenants for update")
            with pytest.raises(Unavailable, match="pg_stat_activity"):
                await asyncio.to_thread(migrate.upgrade, released)
        assert await revision(other) == "0001"


async def test_an_upgrade_takes_tables_in_the_order_of_those_at_work(released: str) -> None:
    """Who holds a tenant may go on to look at hosts. Red when hosts are altered first: both wait for each other, and one of
    them fails."""
    async with connected(released) as working, connected(released) as other:
        async with working.transaction():
            await working.execute("select 1 from tenants for update")
            upgrade = asyncio.create_task(asyncio.to_thread(migrate.upgrade, released))
            await eventually(lambda: waits_for_tenants(other), what="the upgrade waits for the table")
            await working.execute("set local lock_timeout = '500 ms'")
            await working.execute("select 1 from hosts")
        await upgrade


async def test_older_code_leaves_a_newer_schema_as_it_is(
    servers: TestServers, caplog: pytest.LogCaptureFixture
) -> None:
    """So a deployment that failed can be rolled back. Red when it fails on a revision that it does not know."""
    url = await servers.create_database()
    async with connected(url) as connection:
        await connection.execute("update alembic_version set version_num = '9999'")
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(migrate.upgrade, url)
        assert "later version" in caplog.text
        assert await revision(connection) == "9999"
    await servers.drop_database(url)
