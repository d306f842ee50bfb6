"""Where the command line finds the API, and small look-ups that need more than one call."""

import asyncio
import os
from pathlib import Path

from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import NotFoundError
from langgraph_sdk.schema import Run

from sandfleet.localstack import dev_file
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.process import LocalStackError

_SEARCH_PAGE = 100
_LOOKUPS_AT_ONCE = 16


def connect(root: Path) -> LangGraphClient:
    """A client of ``SANDFLEET_API_URL`` (with ``SANDFLEET_API_KEY``), else of the stack that runs in ``root``."""
    if url := os.environ.get("SANDFLEET_API_URL"):
        return get_client(url=url, api_key=os.environ.get("SANDFLEET_API_KEY"))
    return client_of(dev_file.read(root / "dev.json"))


def client_of(info: StackInfo) -> LangGraphClient:
    """A client of this stack."""
    return get_client(url=info.api_url, api_key=info.api_key)


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
    """The run with this id, looked for in all threads, newest first; raises `LocalStackError` if there is none."""
    offset = 0
    while threads := await client.threads.search(
        limit=_SEARCH_PAGE, offset=offset, sort_by="created_at", sort_order="desc"
    ):
        for thread in threads:
            try:
                return await client.runs.get(thread["thread_id"], run_id)
            except NotFoundError:
                continue
        offset += len(threads)
    raise LocalStackError(f"There is no run {run_id}. `sandfleet runs` lists the newest ones.")
