"""What the tests of whole runs share: looking behind the API, into PostgreSQL."""

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from sandfleet.localstack.stack import Stack

Query = Callable[..., Awaitable[list[tuple[Any, ...]]]]


@pytest.fixture
async def query(stack: Stack) -> Query:
    """Run one statement on the stack's database."""

    async def run(statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        async with await psycopg.AsyncConnection.connect(
            stack.info.database_url, autocommit=True
        ) as connection:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    return run
