"""Where the command line finds the API, and look-ups that the SDK has no call for."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import cast
from urllib.parse import quote
from uuid import UUID

from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import NotFoundError, UnprocessableEntityError
from langgraph_sdk.schema import Run

from sandfleet.localstack import dev_file
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.process import LocalStackError

DEFAULT_ASSISTANT = "coder"
"""What runs when nobody is named: the example that everybody has at first."""
_LOOKUPS_AT_ONCE = 16


def connect(root: Path) -> LangGraphClient:
    """A client of ``SANDFLEET_API_URL`` (with ``SANDFLEET_API_KEY``), else of the stack that runs in ``root``."""
    if url := os.environ.get("SANDFLEET_API_URL"):
        return get_client(url=url, api_key=os.environ.get("SANDFLEET_API_KEY"))
    return client_of(dev_file.read(root / "dev.json"))


def client_of(info: StackInfo) -> LangGraphClient:
    """A client of this stack."""
    return get_client(url=info.api_url, api_key=info.api_key)


async def choose_assistant(client: LangGraphClient, wish: str | None) -> str:
    """The assistant to run: the one that is wished for, else the only graph that is there, else `DEFAULT_ASSISTANT`.

    Raises `LocalStackError` that lists the graphs when there is none of this name.
    """
    with suppress(ValueError):
        return str(UUID(wish or ""))
    graphs = sorted({assistant["graph_id"] for assistant in await client.assistants.search(limit=1000)})
    name = wish or (graphs[0] if len(graphs) == 1 else DEFAULT_ASSISTANT)
    if name not in graphs:
        raise LocalStackError(f"Name a graph with --assistant: {', '.join(graphs) or 'there is none'}.")
    return name


async def recent_runs(client: LangGraphClient, limit: int) -> list[Run]:
    """The newest runs of the newest threads, newest first."""
    threads = await client.threads.search(limit=limit, sort_by="created_at", sort_order="desc")
    room = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    async def runs_of(thread_id: str) -> list[Run]:
        async with room:
            return await client.runs.list(thread_id, limit=limit)

    found = await asyncio.gather(*(runs_of(thread["thread_id"]) for thread in threads))
    runs = sorted(
        (run for each in found for run in each), key=lambda run: str(run["created_at"]), reverse=True
    )
    return runs[:limit]


async def find_run(client: LangGraphClient, run_id: str) -> Run:
    """The run with this id, on whatever thread; raises `LocalStackError` if there is none."""
    try:
        return cast(Run, await client.http.get(f"/runs/{quote(run_id, safe='')}"))
    except (NotFoundError, UnprocessableEntityError):
        raise LocalStackError(f"There is no run {run_id}. `sandfleet runs` lists the newest ones.") from None
