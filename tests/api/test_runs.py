"""Runs: what they are made of, reading, cancelling and removing them."""

import asyncio
import uuid
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    RateLimitError,
    UnprocessableEntityError,
)

from sandfleet.shared.streams.entry import decode, stream_key
from tests.api.conftest import Api
from tests.waiting import eventually


@pytest.fixture
async def thread(client: LangGraphClient) -> str:
    return (await client.threads.create())["thread_id"]


async def test_a_run_echoes_what_it_was_asked_in_the_sdks_names(client: LangGraphClient, thread: str) -> None:
    made: Any = await client.runs.create(
        thread,
        "chat",
        input={"q": "\x00 survives"},
        stream_mode=["updates", "messages-tuple", "updates"],
        stream_subgraphs=True,
        stream_resumable=True,
        interrupt_before=["a"],
        interrupt_after="*",
        checkpoint_id="1ef4a9b8-e6fb-67b1-8001-abd5184439d1",
        durability="exit",
        metadata={"m": 1},
    )
    read: Any = await client.runs.get(thread, made["run_id"])
    assert {**read, "updated_at": made["updated_at"]} == made
    kwargs = read["kwargs"]
    assert kwargs["input"] == {"q": "\x00 survives"}
    assert kwargs["stream_mode"] == ["updates", "messages-tuple"]
    assert (kwargs["subgraphs"], kwargs["resumable"], kwargs["durability"]) == (True, True, "exit")
    assert (kwargs["interrupt_before"], kwargs["interrupt_after"]) == (["a"], "*")
    assert kwargs["config"]["metadata"] == read["metadata"]
    assert read["status"] == "pending"


async def test_the_executor_gets_what_the_caller_asked_for(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    checkpoint: Any = {"checkpoint_id": "c9", "checkpoint_ns": "", "thread_id": thread}
    made = await client.runs.create(
        thread,
        "chat",
        command={"resume": 0, "goto": [{"node": "a", "input": {"x": 1}}, "b"], "update": [("k", 1)]},
        checkpoint=checkpoint,
        config={"recursion_limit": 9, "tags": ["t"]},
    )
    run = await api.executor.claim(made["run_id"])
    assert run.kwargs["command"] == {
        "resume": 0,
        "goto": [{"node": "a", "input": {"x": 1}}, "b"],
        "update": [["k", 1]],
    }
    assert run.kwargs["checkpoint"] == {"checkpoint_id": "c9", "checkpoint_ns": ""}
    assert (run.kwargs["config"]["recursion_limit"], run.kwargs["config"]["tags"]) == (9, ["t"])
    assert run.kwargs["input"] is None
    await api.executor.finish(run, 1)


async def test_ids_in_configurable_are_the_servers(api: Api, client: LangGraphClient, thread: str) -> None:
    """A caller cannot pass for another user: tools read `user_id` from there."""
    forged = {"user_id": "bob", "thread_id": "x", "run_id": "x", "mine": 1}
    made: Any = await client.runs.create(thread, "chat", config={"configurable": forged})
    assert made["kwargs"]["config"]["configurable"] == {
        "user_id": "alice",
        "thread_id": thread,
        "run_id": made["run_id"],
        "assistant_id": made["assistant_id"],
        "graph_id": "chat",
        "mine": 1,
    }
    assert made["kwargs"]["context"] == {"mine": 1}
    with pytest.raises(UnprocessableEntityError, match="configurable"):
        await client.runs.create(thread, "chat", config={"configurable": {"__pregel_send": 1}})


async def test_settings_of_assistant_thread_and_run_are_merged(client: LangGraphClient) -> None:
    """Metadata: assistant < thread < the run's config < the run. Context key by key, tags replaced."""
    assistant = await client.assistants.create(
        "chat",
        context={"tone": "dry", "size": 1},
        config={"tags": ["a"], "recursion_limit": 5},
        metadata={"w": "a", "x": "a", "y": "a", "z": "a"},
    )
    thread = await client.threads.create(metadata={"x": "t", "y": "t", "z": "t"})
    config_of_run: Any = {"tags": ["r"], "metadata": {"y": "c", "z": "c"}}
    made: Any = await client.runs.create(
        thread["thread_id"],
        assistant["assistant_id"],
        context={"size": 2},
        config=config_of_run,
        metadata={"z": "r"},
    )
    assert {k: made["metadata"][k] for k in "wxyz"} == {"w": "a", "x": "t", "y": "c", "z": "r"}
    assert made["metadata"]["assistant_id"] == assistant["assistant_id"]
    assert made["kwargs"]["context"] == {"tone": "dry", "size": 2}
    config = made["kwargs"]["config"]
    assert (config["configurable"]["size"], config["configurable"]["tone"]) == (2, "dry")
    assert (config["tags"], config["recursion_limit"]) == (["r"], 5)
    with pytest.raises(BadRequestError):
        await client.runs.create(
            thread["thread_id"], "chat", context={"a": 1}, config={"configurable": {"b": 1}}
        )


async def test_an_update_of_an_assistant_holds_for_the_next_run(client: LangGraphClient, thread: str) -> None:
    """Only the deployment's own assistants are remembered between requests."""
    assistant = await client.assistants.create("chat", context={"n": 1})
    await client.runs.create(thread, assistant["assistant_id"])
    await client.assistants.update(assistant["assistant_id"], context={"n": 2})
    made: Any = await client.runs.create(thread, assistant["assistant_id"])
    assert made["kwargs"]["context"] == {"n": 2}


async def test_the_thread_knows_its_graph_and_is_busy_from_creation_on(
    client: LangGraphClient, thread: str
) -> None:
    made = await client.runs.create(thread, "chat", after_seconds=3600, metadata={"only": "run"})
    assert made["created_at"] > (await client.threads.get(thread))["updated_at"]
    found = await client.threads.get(thread)
    assert found["status"] == "busy"
    assert found["metadata"] == {"graph_id": "chat", "assistant_id": made["assistant_id"]}
    await client.runs.cancel(thread, made["run_id"], wait=True)
    assert (await client.threads.get(thread))["status"] == "idle"


async def test_what_does_not_exist_is_told_apart_by_status(client: LangGraphClient, thread: str) -> None:
    nothing = str(uuid.uuid4())
    with pytest.raises(UnprocessableEntityError):
        await client.runs.create(thread, "no-such-graph")
    with pytest.raises(NotFoundError):
        await client.runs.create(thread, nothing)
    with pytest.raises(NotFoundError):
        await client.runs.create(nothing, "chat")
    with pytest.raises(UnprocessableEntityError):
        await client.runs.create("no-uuid", "chat")
    made = await client.runs.create(nothing, "chat", if_not_exists="create")
    assert made["thread_id"] == nothing


async def test_runs_are_listed_newest_first(client: LangGraphClient, thread: str) -> None:
    made = [(await client.runs.create(thread, "chat"))["run_id"] for _ in range(3)]

    async def ids(**wanted: Any) -> list[str]:
        return [run["run_id"] for run in await client.runs.list(thread, **wanted)]

    assert await ids() == made[::-1]
    assert await ids(limit=1, offset=1) == [made[1]]
    assert await ids(status="success") == []
    shown: Any = await client.runs.list(thread, select=["run_id", "status"], limit=1)
    assert shown == [{"run_id": made[2], "status": "pending"}]
    with pytest.raises(NotFoundError):
        await client.runs.get((await client.threads.create())["thread_id"], made[0])


async def test_reject_refuses_a_second_run(client: LangGraphClient, thread: str) -> None:
    await client.runs.create(thread, "chat")
    with pytest.raises(ConflictError):
        await client.runs.create(thread, "chat", multitask_strategy="reject")


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_a_run_that_takes_over_tells_the_one_before_to_stop(
    api: Api, client: LangGraphClient, thread: str, strategy: Any
) -> None:
    first = await client.runs.create(thread, "chat")
    run = await api.executor.claim(first["run_id"])
    await client.runs.create(thread, "chat", multitask_strategy=strategy)
    redis = api.app.state.resources.redis
    assert await eventually(lambda: redis.get(f"sf:cancel:{first['run_id']}")) == strategy.encode()
    assert await redis.ttl(f"sf:cancel:{first['run_id']}") > 0
    await api.executor.finish(run, 1, status="interrupted")


async def test_a_full_queue_answers_429_with_retry_after(
    api: Api, client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    await api.sql("update tenants set max_queued = 1 where tenant = 'acme'")
    await client.runs.create(thread, "chat")
    await client.runs.create(thread, "chat")
    try:
        with pytest.raises(RateLimitError):
            await client.runs.create(thread, "chat")
        answer = await http.post(f"/threads/{thread}/runs/stream", json={"assistant_id": "chat"})
        assert int(answer.headers["retry-after"]) > 0
    finally:
        await api.sql("update tenants set max_queued = 100000 where tenant = 'acme'")


async def test_the_executors_of_the_pool_are_rung(api: Api, client: LangGraphClient, thread: str) -> None:
    redis = api.app.state.resources.redis
    await redis.delete("sf:ring:default")
    await client.runs.create(thread, "chat")
    assert await eventually(lambda: redis.llen("sf:ring:default")) == 1


async def test_cancel_of_a_pending_run_ends_it(client: LangGraphClient, thread: str) -> None:
    made = await client.runs.create(thread, "chat")
    await client.runs.cancel(thread, made["run_id"])
    assert (await client.runs.get(thread, made["run_id"]))["status"] == "interrupted"
    assert (await client.threads.get(thread))["status"] == "idle"
    with pytest.raises(NotFoundError):
        await client.runs.cancel(thread, made["run_id"])


async def test_cancel_of_a_pending_run_tells_its_watchers(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    """Red when they have to find it out by themselves, once a second."""
    made = await client.runs.create(thread, "chat")
    await client.runs.cancel(thread, made["run_id"])
    redis, key = api.app.state.resources.redis, stream_key(uuid.UUID(made["run_id"]))
    ((entry_id, fields),) = await eventually(lambda: redis.xrange(key))
    assert [(str(e.id), e.event) for e in decode(entry_id, fields[b"e"])] == [("1-0", "end")]
    assert await redis.ttl(key) > 0


async def test_what_a_new_run_interrupts_before_it_began_tells_its_watchers(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    """Red when the ends that a submission makes are told to nobody: watchers would find them out a second later."""
    ended = [await client.runs.create(thread, "chat") for _ in range(2)]
    await client.runs.create(thread, "chat", multitask_strategy="interrupt", after_seconds=3600)
    redis = api.app.state.resources.redis
    for run in ended:
        assert (await client.runs.get(thread, run["run_id"]))["status"] == "interrupted"
        found = await eventually(lambda run=run: redis.xrange(stream_key(uuid.UUID(run["run_id"]))))  # type: ignore[misc]
        ((entry_id, fields),) = found
        assert [(str(e.id), e.event) for e in decode(entry_id, fields[b"e"])] == [("1-0", "end")]


async def test_a_delayed_run_interrupts_when_it_is_accepted(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    """As LangGraph's server does. Red when the run that works is left alone until the other is due."""
    made = await client.runs.create(thread, "chat")
    run = await api.executor.claim(made["run_id"])
    await client.runs.create(thread, "chat", multitask_strategy="rollback", after_seconds=3600)
    assert await api.sql("select cancel_action from runs where run_id = %s", made["run_id"]) == [
        ("rollback",)
    ]
    await api.executor.finish(run, 1, status="interrupted", thread_status=None, rollback=True)


async def test_cancel_with_wait_answers_after_the_end(api: Api, client: LangGraphClient, thread: str) -> None:
    made = await client.runs.create(thread, "chat")
    run = await api.executor.claim(made["run_id"])
    cancelling = asyncio.ensure_future(client.runs.cancel(thread, made["run_id"], wait=True))
    redis = api.app.state.resources.redis
    await eventually(lambda: redis.get(f"sf:cancel:{made['run_id']}"))
    assert not cancelling.done()
    await api.executor.finish(run, 1, status="interrupted")
    result: Any = await cancelling  # type: ignore[func-returns-value]
    assert result == {}


async def test_rollback_leaves_no_run(api: Api, client: LangGraphClient, thread: str) -> None:
    pending = await client.runs.create(thread, "chat")
    await client.runs.cancel(thread, pending["run_id"], action="rollback", wait=True)
    running = await client.runs.create(thread, "chat")
    run = await api.executor.claim(running["run_id"])
    cancelling = asyncio.ensure_future(
        client.runs.cancel(thread, running["run_id"], action="rollback", wait=True)
    )
    await eventually(
        lambda: api.sql("select 1 from runs where cancel_action = 'rollback' and thread_id = %s", thread)
    )
    await api.executor.finish(run, 1, status="interrupted", thread_status=None, rollback=True)
    await cancelling
    for gone in (pending, running):
        with pytest.raises(NotFoundError):
            await client.runs.get(thread, gone["run_id"])
    assert (await client.threads.get(thread))["status"] == "idle"


async def test_many_are_cancelled_by_name_or_by_status(
    api: Api, client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    made = [(await client.runs.create(thread, "chat"))["run_id"] for _ in range(4)]
    await client.runs.cancel_many(thread_id=thread, run_ids=made[2:3])
    assert (await client.runs.get(thread, made[2]))["status"] == "interrupted"
    with pytest.raises(NotFoundError):
        await client.runs.cancel_many(thread_id=thread, run_ids=[made[3], str(uuid.uuid4())])
    assert (await client.runs.get(thread, made[3]))["status"] == "pending"
    await client.runs.cancel_many(status="all")
    assert {run["status"] for run in await client.runs.list(thread)} == {"interrupted"}
    for wrong in (
        {},
        {"thread_id": thread},
        {"run_ids": made},
        {"thread_id": thread, "run_ids": made, "status": "all"},
    ):
        assert (await http.post("/runs/cancel", json=wrong)).status_code == 422


async def test_deleting_the_newest_run_takes_its_states_back(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    for n in (1, 2):
        made = await client.runs.create(thread, "chat")
        run = await api.executor.claim(made["run_id"])
        tasks = [{"id": "t1", "name": "a", "interrupts": [{"id": "i", "value": "a\x00"}]}]
        await api.executor.snapshot(
            run, f"c{n}", {"n": n}, following=["a"] * (n == 1), tasks=tasks * (n == 1)
        )
        await api.executor.finish(run, 1)
    await client.runs.delete(thread, made["run_id"])
    found = await client.threads.get(thread)
    assert (found["values"], found["status"]) == ({"n": 1}, "interrupted")
    assert found["interrupts"] == {"t1": [{"id": "i", "value": "a\x00"}]}
    with pytest.raises(NotFoundError):
        await client.runs.get(thread, made["run_id"])


async def test_deleting_a_running_run_frees_its_thread(
    api: Api, client: LangGraphClient, thread: str
) -> None:
    first = await client.runs.create(thread, "chat")
    run = await api.executor.claim(first["run_id"])
    second = await client.runs.create(thread, "chat")
    await client.runs.delete(thread, first["run_id"])
    next_run = await api.executor.claim(second["run_id"])
    await api.executor.finish(next_run, 1)
    assert await api.sql("select 1 from journal where run_id = %s", run.fence.key.run_id) == []


async def test_a_stateless_run_has_a_hidden_thread(api: Api, client: LangGraphClient) -> None:
    made = await client.runs.create(None, "chat", input={})
    assert (await client.threads.get(made["thread_id"]))["status"] == "busy"
    assert await client.threads.search(ids=[made["thread_id"]]) == []
    run = await api.executor.claim(made["run_id"])
    await api.executor.finish(run, 1)
    expires = await api.sql("select expires_at is not null from threads where thread_id = %s", run.thread_id)
    assert expires == [(True,)]


async def test_on_completion_keep_keeps_the_thread(api: Api, client: LangGraphClient) -> None:
    made: Any = await client.runs.create(None, "chat", on_completion="keep")
    run = await api.executor.claim(made["run_id"])
    await api.executor.finish(run, 1)
    expires = await api.sql("select expires_at from threads where thread_id = %s", run.thread_id)
    assert expires == [(None,)]
    assert len(await client.threads.search(ids=[made["thread_id"]])) == 1


async def test_a_batch_is_accepted_whole_or_not_at_all(
    api: Api, client: LangGraphClient, http: httpx.AsyncClient
) -> None:
    made: Any = await client.runs.create_batch(
        [{"assistant_id": "chat", "input": {"n": n}} for n in range(3)]  # type: ignore[typeddict-item]
    )
    assert [run["kwargs"]["input"] for run in made] == [{"n": 0}, {"n": 1}, {"n": 2}]
    before = await api.sql("select count(*) from runs")
    bodies: list[Any] = [
        [],
        {},
        [{"assistant_id": "chat"}, {"assistant_id": 1}],
        [{"assistant_id": "chat"}, {"assistant_id": "x"}],
    ]
    for bad in bodies:
        assert (await http.post("/runs/batch", json=bad)).status_code == 422
    assert await api.sql("select count(*) from runs") == before
    await client.runs.cancel_many(status="all")


async def test_timing_tells_what_happened_and_null_for_what_did_not(
    api: Api, client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    made = await client.runs.create(thread, "chat")
    pending = (await http.get(f"/runs/{made['run_id']}/timing")).json()
    assert pending["started_at"] is None
    assert pending["latencies"]["queue_ms"] is None
    run = await api.executor.claim(made["run_id"])
    await api.executor.finish(run, 1)
    done = (await http.get(f"/threads/{thread}/runs/{made['run_id']}/timing")).json()
    assert done["created_at"] <= done["ready_at"] <= done["started_at"] <= done["finished_at"]
    assert done["first_model_request_at"] is done["latencies"]["accept_to_model_ms"] is None
    assert 0 < done["latencies"]["run_ms"] <= done["latencies"]["total_ms"]


@pytest.mark.parametrize(
    "asked",
    [
        {"webhook": "https://example.org"},
        {"feedback_keys": ["a"]},
        {"stream_mode": "events"},
        {"langsmith_tracing": {"project_name": "x"}},
        {"strict_resume": True},
        {"on_completion": "delete"},
    ],
)
async def test_what_is_not_honoured_is_refused_by_name(
    client: LangGraphClient, thread: str, asked: Any
) -> None:
    name = next(iter(asked)).removesuffix("_tracing")
    with pytest.raises(UnprocessableEntityError, match=name):
        async for _ in client.runs.stream(thread, "chat", **asked):
            pass


async def test_a_child_names_its_parent(
    client: LangGraphClient, http: httpx.AsyncClient, thread: str
) -> None:
    """Made by every way to create a run. Red when the header is ignored, or a run without a parent shows one."""
    parent: Any = await client.runs.create(thread, "chat", input={})
    header = {"X-Parent-Run-Id": parent["run_id"]}
    child: Any = await client.runs.create(None, "chat", input={}, headers=header)
    (batched,) = (await http.post("/runs/batch", json=[{"assistant_id": "chat"}], headers=header)).json()
    for run in (child, batched, (await http.get(f"/runs/{child['run_id']}")).json()):
        assert run["parent_run_id"] == parent["run_id"]
    assert "parent_run_id" not in parent
    await client.runs.cancel(thread, parent["run_id"])
    for run in (child, batched):
        assert (await http.get(f"/runs/{run['run_id']}")).json()["status"] == "interrupted"


async def test_a_child_of_nobody_is_refused(client: LangGraphClient, thread: str) -> None:
    """Red when such a run is accepted without a parent."""
    with pytest.raises(NotFoundError):
        await client.runs.create(thread, "chat", input={}, headers={"X-Parent-Run-Id": str(uuid.uuid4())})
    with pytest.raises(UnprocessableEntityError):
        await client.runs.create(thread, "chat", input={}, headers={"X-Parent-Run-Id": "parent"})
    parent: Any = await client.runs.create(thread, "chat", input={})
    await client.runs.cancel(thread, parent["run_id"])
    with pytest.raises(ConflictError):
        await client.runs.create(thread, "chat", input={}, headers={"X-Parent-Run-Id": parent["run_id"]})
