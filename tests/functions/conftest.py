"""A database for tests of the scaler: emptied, with one tenant."""

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key


@pytest.fixture
async def connection(database: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "truncate runs, threads, journal, tenants, api_keys, executors, hosts, placements, scaling cascade"
        )
        await create_key(connection, Owner("a", "u"), "test")
        yield connection


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, 2) as pool:
        yield pool
