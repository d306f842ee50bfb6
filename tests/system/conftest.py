"""What the tests of whole runs share: looking behind the API, into PostgreSQL."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.stack import Stack

Query = Callable[..., Awaitable[list[tuple[Any, ...]]]]


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the fault points of a module's own stack look."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
async def client(stack: Stack) -> AsyncIterator[LangGraphClient]:
    """An unmodified ``langgraph-sdk`` client of the module's stack: the shared one, or one of its own."""
    async with get_client(url=stack.info.api_url, api_key=stack.info.api_key) as client:
        yield client


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
