"""States of threads, read without any graph's code, and the update that an executor makes."""

import asyncio
import json
import uuid
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import (
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    UnprocessableEntityError,
)

from tests.api.conftest import Api
from tests.waiting import eventually

FIRST, SECOND, INNER = (f"1ef4a9b8-e6fb-67b1-800{n}-abd5184439d1" for n in range(3))


@pytest.fixture
async def thread(api: Api, client: LangGraphClient) -> str:
    """A thread with two states; the second waits in node `a`, a subgraph that has a state of its own."""
    thread_id = (await client.threads.create())["thread_id"]
    made = await client.runs.create(thread_id, "chat")
    run = await api.executor.claim(made["run_id"])
    await api.executor.snapshot(run, FIRST, {"n": 1, "log": ["a"]}, metadata={"step": 0, "odd": "\x00"})
    inner = {"thread_id": thread_id, "checkpoint_ns": "a:1", "checkpoint_id": INNER}
    task = {
        "id": "t",
        "name": "a",
        "path": ["__pregel_pull", "a"],
        "error": None,
        "interrupts": [{"id": "i", "value": "ok?"}],
        "checkpoint": inner,
        "state": None,
        "result": None,
    }
    await api.executor.snapshot(run, INNER, {"inside": True}, ns="a:1")
    await api.executor.snapshot(
        run,
        SECOND,
        {"n": 2, "log": ["a", "b"]},
        parent=FIRST,
        following=["a"],
        tasks=[task],
        metadata={"step": 1},
    )
    interrupts = {"t": task["interrupts"]}
    await api.executor.finish(
        run,
        1,
        output={"checkpoint_id": SECOND, "interrupts": interrupts},
        thread_status="interrupted",
        interrupts=interrupts,
    )
    return thread_id


async def test_the_newest_state(client: LangGraphClient, thread: str) -> None:
    state: Any = await client.threads.get_state(thread)
    assert state["values"] == {"n": 2, "log": ["a", "b"]}
    assert state["next"] == ["a"]
    assert state["checkpoint"] == {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": SECOND}
    assert state["parent_checkpoint"]["checkpoint_id"] == FIRST
    assert (state["checkpoint_id"], state["parent_checkpoint_id"]) == (SECOND, FIRST)
    assert state["interrupts"] == [{"id": "i", "value": "ok?"}]
    assert state["tasks"][0]["checkpoint"]["checkpoint_ns"] == "a:1"
    assert state["metadata"]["step"] == 1
    assert state["created_at"]


async def test_subgraphs_fill_the_tasks_state(client: LangGraphClient, thread: str) -> None:
    state: Any = await client.threads.get_state(thread, subgraphs=True)
    assert state["tasks"][0]["checkpoint"] is None
    assert state["tasks"][0]["state"]["values"] == {"inside": True}


async def test_a_state_by_its_checkpoint(client: LangGraphClient, thread: str) -> None:
    by_id = await client.threads.get_state(thread, checkpoint_id=FIRST)
    by_checkpoint = await client.threads.get_state(
        thread,
        {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": FIRST, "checkpoint_map": {}},
    )
    assert by_id == by_checkpoint
    assert by_id["values"] == {"n": 1, "log": ["a"]}
    assert by_id["metadata"]["odd"] == "\x00"  # type: ignore[index]
    inside: Any = {"thread_id": thread, "checkpoint_ns": "a:1"}
    assert (await client.threads.get_state(thread, inside))["values"] == {"inside": True}
    with pytest.raises(NotFoundError):
        await client.threads.get_state(thread, checkpoint_id=str(uuid.uuid4()))


async def test_parts_of_a_state_are_selected(client: LangGraphClient, thread: str) -> None:
    state: Any = await client.threads.get_state(thread, select=["values.n", "next"])
    assert state == {"values": {"n": 2}, "next": ["a"]}
    states: Any = await client.threads.get_history(thread, select=["values.nothing"])
    assert states == [{"values": {}}] * 2
    with pytest.raises(UnprocessableEntityError):
        await client.threads.get_state(thread, select=["secrets"])


async def test_a_thread_without_states(client: LangGraphClient) -> None:
    thread = (await client.threads.create())["thread_id"]
    state: Any = await client.threads.get_state(thread)
    assert (state["values"], state["next"], state["tasks"], state["checkpoint"]) == ({}, [], [], None)
    assert await client.threads.get_history(thread) == []


async def test_history_is_newest_first_and_filtered(client: LangGraphClient, thread: str) -> None:
    async def ids(**wanted: Any) -> list[str | None]:
        return [s["checkpoint"]["checkpoint_id"] for s in await client.threads.get_history(thread, **wanted)]

    assert await ids() == [SECOND, FIRST]
    assert await ids(limit=1) == [SECOND]
    assert await ids(metadata={"step": 0}) == [FIRST]
    assert await ids(checkpoint={"checkpoint_id": FIRST}) == [FIRST]
    assert await ids(checkpoint={"checkpoint_ns": "a:1"}) == [INNER]


async def test_before_comes_in_three_forms(
    client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    """An id, a checkpoint, and a config: the reference server fails on what the SDK sends."""
    checkpoint = {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": SECOND}
    for before in (SECOND, checkpoint, {"configurable": checkpoint}):
        found = await client.threads.get_history(thread, before=before)  # type: ignore[arg-type]
        assert [s["checkpoint"]["checkpoint_id"] for s in found] == [FIRST]
    by_query = await http.get(f"/threads/{thread}/history", params={"before": SECOND, "limit": 5})
    assert [s["checkpoint_id"] for s in by_query.json()] == [FIRST]


async def _answer(api: Api, output: Any = None, error: Any = None) -> Any:
    """Do what an executor does with an update of a state."""
    run = await api.executor.claim()
    assert run.kind == "update_state"
    await api.executor.finish(run, 1, output=output, error=error)
    return run


async def test_an_update_is_made_by_an_executor(api: Api, client: LangGraphClient, thread: str) -> None:
    """It gets all that was asked for; afterwards nothing of the operation is left but what it did."""
    checkpoint = {"thread_id": thread, "checkpoint_ns": "", "checkpoint_id": "c3"}
    output = {"checkpoint": checkpoint, "configurable": checkpoint, "checkpoint_id": "c3"}
    answering = asyncio.ensure_future(_answer(api, output))
    updated = await client.threads.update_state(thread, {"n": "\x00"}, as_node="a", checkpoint_id=FIRST)
    run = await answering
    assert updated == output
    assert run.kwargs["values"] == {"n": "\x00"}
    assert run.kwargs["as_node"] == "a"
    assert run.kwargs["checkpoint"] == {"checkpoint_id": FIRST}
    assert (run.run_class, run.graph_id) == (0, "chat")
    assert len(await client.runs.list(thread)) == 1
    assert await api.sql("select 1 from runs where kind <> 'run'") == []
    assert await api.sql("select 1 from journal where run_id = %s", run.fence.key.run_id) == []


async def test_an_update_that_the_graph_refuses_is_400(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    """And the thread is as it was: still waiting for its answer."""
    error = {"error": "InvalidUpdateError", "message": "Node nowhere does not exist"}
    answering = asyncio.ensure_future(_answer(api, error=error))
    with pytest.raises(BadRequestError, match="nowhere"):
        await client.threads.update_state(thread, {}, as_node="nowhere")
    await answering
    found = await client.threads.get(thread)
    assert found["status"] == "interrupted"
    assert found["interrupts"] == {"t": [{"id": "i", "value": "ok?"}]}


async def test_an_update_of_a_busy_thread_is_refused(api: Api, client: LangGraphClient, thread: str) -> None:
    await client.runs.create(thread, "chat")
    with pytest.raises(ConflictError):
        await client.threads.update_state(thread, {"n": 3})


async def test_an_update_of_a_thread_without_a_graph_is_400(client: LangGraphClient) -> None:
    for metadata in ({}, {"graph_id": 7}, {"graph_id": "not-deployed", "assistant_id": "nor\ud7ffthis"}):
        thread = (await client.threads.create(metadata=metadata))["thread_id"]
        with pytest.raises(BadRequestError, match="graph"):
            await client.threads.update_state(thread, {"n": 3})


async def test_without_an_executor_an_update_is_withdrawn(
    api: Api, client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    """503 with Retry-After, and nothing is left behind that an executor could do later."""
    with pytest.raises(InternalServerError):
        await client.threads.update_state(thread, {"n": 3})
    answer = await http.post(f"/threads/{thread}/state", json={"values": {"n": 3}})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert await api.sql("select 1 from runs where status in ('pending', 'running') or kind <> 'run'") == []
    assert (await client.threads.get(thread))["status"] == "interrupted"


async def test_an_update_that_ends_while_it_is_withdrawn_counts(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    """An executor had begun it and finishes in time: the caller gets the result, not an error."""

    async def late() -> None:
        run = await api.executor.claim()
        asked = "select 1 from runs where run_id = %s and cancel_action is not null"
        await eventually(lambda: api.sql(asked, run.fence.key.run_id))
        await api.executor.finish(
            run, 1, output={"checkpoint": {}, "checkpoint_id": "late", "configurable": {}}
        )

    finishing = asyncio.ensure_future(late())
    updated: Any = await client.threads.update_state(thread, {"n": 3})
    await finishing
    assert updated["checkpoint_id"] == "late"


async def test_the_state_of_a_message_list(api: Api, client: LangGraphClient) -> None:
    """A graph's state may be a list; it is shown as it is."""
    thread_id = (await client.threads.create())["thread_id"]
    made = await client.runs.create(thread_id, "chat")
    run = await api.executor.claim(made["run_id"])
    await api.executor.snapshot(run, FIRST, [{"type": "human"}])
    await api.executor.finish(run, 1, output={"checkpoint_id": FIRST, "interrupts": {}})
    assert (await client.threads.get_state(thread_id))["values"] == [{"type": "human"}]
    assert json.dumps(await client.runs.join(thread_id, made["run_id"])) == '[{"type": "human"}]'
