"""The synchronous SDK client speaks the same."""

import asyncio
from typing import Any

from langgraph_sdk import get_sync_client

from tests.api.conftest import Api


async def test_the_synchronous_client_creates_reads_streams_and_deletes(api: Api) -> None:
    def use() -> dict[str, Any]:
        with get_sync_client(url=api.url, api_key=api.alice) as client:
            assistant = client.assistants.create("chat", name="sync")
            client.assistants.update(assistant["assistant_id"], metadata={"a": 1})
            thread = client.threads.create(metadata={"sync": True})
            assert client.threads.search(metadata={"sync": True})[0]["thread_id"] == thread["thread_id"]
            assert client.threads.count(metadata={"sync": True}) == 1
            parts = list(client.runs.stream(thread["thread_id"], assistant["assistant_id"], input={"q": 1}))
            run_id = parts[0].data["run_id"]
            run: Any = client.runs.get(thread["thread_id"], run_id)
            assert client.runs.join(thread["thread_id"], run_id) == {"n": 1}
            assert client.threads.get_state(thread["thread_id"])["values"] == {"n": 1}
            client.threads.delete(thread["thread_id"])
            client.assistants.delete(assistant["assistant_id"])
            return {"events": [part.event for part in parts], "run": run}

    using = asyncio.ensure_future(asyncio.to_thread(use))
    run = await api.executor.claim()
    await api.executor.emit(run, 1, "values", {"n": 1})
    await api.executor.snapshot(run, "c1", {"n": 1})
    await api.executor.finish(run, 2, output={"checkpoint_id": "c1", "interrupts": {}})
    used = await using
    assert used["events"] == ["metadata", "values", "end"]
    assert used["run"]["status"] == "success"
