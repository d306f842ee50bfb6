"""A run's tool calls in the API: what is shown, and that they end and go with the run."""

import uuid
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient

from sandfleet.shared.store.claims import ClaimedRun
from tests.api.conftest import Api


async def call(api: Api, run: ClaimedRun, name: str, status: str, error: str | None = None) -> str:
    """Write what an executor's ledger writes; returns the call's id."""
    call_id = str(uuid.uuid4())
    await api.executor.connection.execute(
        """insert into tool_calls (tenant, user_id, run_id, call_id, execution, ns, message_id, tool_call_id, name, attempt,
                                   status, outcome, type, body, error, finished_at)
           values (%s, %s, %s, %s, 0, 'tools:1', 'm1', 'call_1', %s, %s, %s, 'returned', 'msgpack', 'secret', %s,
                   case when %s <> 'started' then clock_timestamp() end)""",
        (*run.fence.key, call_id, name, run.fence.attempt, status, error, status),
    )
    return call_id


async def statuses(api: Api, run: ClaimedRun) -> list[Any]:
    rows = await api.sql(
        f"select status from tool_calls where run_id = '{run.fence.key.run_id}' order by started_at"
    )
    return [row[0] for row in rows]


@pytest.fixture
async def thread(client: LangGraphClient) -> str:
    return (await client.threads.create())["thread_id"]


@pytest.fixture
async def run(api: Api, client: LangGraphClient, thread: str) -> ClaimedRun:
    made = await client.runs.create(thread, "chat")
    return await api.executor.claim(made["run_id"])


async def test_tool_calls_are_listed_without_their_content(
    api: Api, http: httpx.AsyncClient, thread: str, run: ClaimedRun
) -> None:
    """Red when a field is missing, a result leaks, or a run of another thread is shown."""
    run_id = run.fence.key.run_id
    first = await call(api, run, "append", "finished")
    await call(api, run, "fetch", "failed", "ValueError: no")
    await call(api, run, "append", "started")
    answer = await http.get(f"/threads/{thread}/runs/{run_id}/tool_calls")
    listed = answer.json()
    assert [(c["name"], c["status"], c["error"]) for c in listed] == [
        ("append", "finished", None),
        ("fetch", "failed", "ValueError: no"),
        ("append", "started", None),
    ]
    assert listed[0].keys() == {
        *("id", "execution", "name", "tool_call_id", "message_id", "checkpoint_ns", "attempt", "status"),
        *("error", "started_at", "finished_at"),
    }
    assert (listed[0]["id"], listed[0]["attempt"]) == (first, 1)
    assert listed[0]["started_at"] <= listed[0]["finished_at"]
    assert listed[2]["finished_at"] is None
    assert "secret" not in answer.text
    assert (await http.get(f"/runs/{run_id}/tool_calls")).json() == listed
    assert (await http.get(f"/threads/{uuid.uuid4()}/runs/{run_id}/tool_calls")).status_code == 404
    assert (await http.get(f"/runs/{uuid.uuid4()}/tool_calls")).status_code == 404
    await api.executor.finish(run, 1)


async def test_the_end_of_a_run_leaves_no_call_open(api: Api, run: ClaimedRun) -> None:
    """Red when the terminal transaction leaves `started` behind, or touches what has ended."""
    await call(api, run, "append", "finished")
    await call(api, run, "append", "started")
    await api.executor.finish(run, 1)
    assert await statuses(api, run) == ["finished", "orphaned"]


async def test_a_run_that_somebody_else_ends_leaves_no_call_open(api: Api, run: ClaimedRun) -> None:
    """The sweep and the control loop end runs so. Red when `end_run` leaves `started` behind."""
    await call(api, run, "append", "started")
    await api.executor.connection.execute(
        "select end_run(%s, %s, %s, 'timeout', '{}'::json, 60)", run.fence.key
    )
    assert await statuses(api, run) == ["orphaned"]


@pytest.mark.parametrize("end", ["run", "thread", "rollback"])
async def test_calls_go_with_their_run(
    api: Api, client: LangGraphClient, thread: str, run: ClaimedRun, end: str
) -> None:
    """Red when the removal of a run, its thread or its effects leaves rows."""
    await call(api, run, "append", "finished")
    await call(api, run, "append", "started")
    if end == "run":
        await client.runs.delete(thread, str(run.fence.key.run_id))
    elif end == "thread":
        await client.threads.delete(thread)
    else:
        await api.executor.finish(run, 1, rollback=True)
    assert await statuses(api, run) == []
