"""Threads through the SDK."""

import asyncio
import hashlib
import uuid
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableEntityError

from sandfleet.shared.store.claims import ClaimedRun
from tests.api.conftest import Api


async def finished(
    api: Api, thread_id: str, values: Any, checkpoint_id: str = "c1", **more: Any
) -> ClaimedRun:
    """A run on the thread that ended with these values."""
    async with api.client() as client:
        made = await client.runs.create(thread_id, "chat", input={})
    run = await api.executor.claim(made["run_id"])
    await api.executor.snapshot(run, checkpoint_id, values, **more)
    await api.executor.finish(run, 1, output={"checkpoint_id": checkpoint_id, "interrupts": {}})
    return run


async def test_a_new_thread_is_idle_and_empty(client: LangGraphClient) -> None:
    thread = await client.threads.create(metadata={"a": 1}, graph_id="chat")
    assert thread["status"] == "idle"
    assert thread["metadata"] == {"a": 1, "graph_id": "chat"}
    assert (thread["values"], thread["interrupts"]) == (None, {})
    assert thread["created_at"].endswith("+00:00")  # type: ignore[attr-defined]
    assert await client.threads.get(thread["thread_id"]) == thread


async def test_an_id_is_taken_once(client: LangGraphClient) -> None:
    chosen = str(uuid.uuid4())
    first = await client.threads.create(thread_id=chosen, metadata={"a": 1})
    with pytest.raises(ConflictError):
        await client.threads.create(thread_id=chosen)
    assert await client.threads.create(thread_id=chosen, metadata={"b": 1}, if_exists="do_nothing") == first


async def test_two_users_may_choose_the_same_id(api: Api, client: LangGraphClient) -> None:
    """Keys are (tenant, user, id): nobody can squat another's ids, or learn that they are taken."""
    chosen = str(uuid.uuid4())
    await client.threads.create(thread_id=chosen, metadata={"of": "alice"})
    async with api.client(api.bob) as bob:
        await bob.threads.create(thread_id=chosen, metadata={"of": "bob"})
        assert (await bob.threads.get(chosen))["metadata"] == {"of": "bob"}
    assert (await client.threads.get(chosen))["metadata"] == {"of": "alice"}


async def test_update_merges_the_top_level_and_keeps_nulls(client: LangGraphClient) -> None:
    thread = await client.threads.create(metadata={"a": {"x": 1}, "b": 1})
    updated = await client.threads.update(thread["thread_id"], metadata={"a": {"y": 2}, "c": None})
    assert updated["metadata"] == {"a": {"y": 2}, "b": 1, "c": None}
    nothing: Any = await client.threads.update(thread["thread_id"], metadata={}, return_minimal=True)  # type: ignore[func-returns-value]
    assert nothing is None


async def test_search_filters_sorts_and_pages(client: LangGraphClient) -> None:
    mark = uuid.uuid4().hex
    made = [(await client.threads.create(metadata={"mark": mark, "n": n}))["thread_id"] for n in range(3)]

    async def ids(**wanted: Any) -> list[str]:
        return [t["thread_id"] for t in await client.threads.search(metadata={"mark": mark}, **wanted)]

    assert await ids() == made[::-1]
    assert await ids(sort_by="created_at", sort_order="asc") == made
    assert await ids(limit=1, offset=1) == [made[1]]
    assert await ids(ids=made[:2]) == made[1::-1]
    assert await ids(status="busy") == []
    assert await client.threads.count(metadata={"mark": mark}) == 3
    shown: Any = await client.threads.search(metadata={"mark": mark}, select=["status"], limit=1)
    assert shown == [{"status": "idle"}]
    with pytest.raises(BadRequestError):
        await ids(ids=["no-uuid"])


async def test_pagination_headers_say_where_the_next_page_begins(http: httpx.AsyncClient) -> None:
    mark = uuid.uuid4().hex
    for _ in range(3):
        await http.post("/threads", json={"metadata": {"mark": mark}})
    body = {"metadata": {"mark": mark}, "limit": 2}
    first = await http.post("/threads/search", json=body)
    assert (first.headers["x-pagination-next"], first.headers["x-pagination-total"]) == ("2", "3")
    last = await http.post("/threads/search", json={**body, "offset": 2})
    assert "x-pagination-next" not in last.headers


async def test_values_are_those_of_the_newest_state(api: Api, client: LangGraphClient) -> None:
    thread_id = (await client.threads.create())["thread_id"]
    await finished(api, thread_id, {"n": 1}, "zzz")
    await finished(api, thread_id, {"n": 2}, "aaa")  # ids carry hosts' clocks and decide nothing
    assert (await client.threads.get(thread_id))["values"] == {"n": 2}


async def test_large_values_are_put_back_from_where_they_are_stored(
    api: Api, client: LangGraphClient
) -> None:
    thread_id = (await client.threads.create())["thread_id"]
    body = '"' + "x" * 20_000 + '"'
    digest = hashlib.sha256(body.encode()).digest()
    await api.sql(
        "insert into state_blobs (tenant, user_id, thread_id, hash, body) values ('acme', 'alice', %s, %s, %s)",
        thread_id,
        digest,
        body,
    )
    await finished(api, thread_id, {"small": 1, "large": None}, refs={"large": digest.hex()})
    expected = {"small": 1, "large": "x" * 20_000}
    assert (await client.threads.get(thread_id))["values"] == expected
    assert (await client.threads.get_state(thread_id))["values"] == expected
    found = await client.threads.search(values={"large": "x" * 20_000})
    assert [t["values"] for t in found] == [expected]


async def test_values_are_searched_by_key_also_beside_what_postgresql_cannot_read(
    api: Api, client: LangGraphClient
) -> None:
    """U+0000 in any thread's values, or a thread without values, must not break the search for others."""
    mark = uuid.uuid4().hex
    await client.threads.create()
    thread_id = (await client.threads.create())["thread_id"]
    await finished(api, thread_id, {"mark": mark, "odd": "a\x00b", "list": [1, {"x": None}]})
    for wanted, count in (
        ({"mark": mark}, 1),
        ({"mark": mark, "list": [1, {"x": None}]}, 1),
        ({"mark": 1}, 0),
    ):
        assert await client.threads.count(values=wanted) == count
    found = await client.threads.search(values={"mark": mark})
    assert found[0]["values"]["odd"] == "a\x00b"  # type: ignore[index]


async def test_extract_takes_parts_out(api: Api, client: LangGraphClient) -> None:
    thread_id = (await client.threads.create(metadata={"a.b": 1}))["thread_id"]
    await finished(api, thread_id, {"log": [{"t": "first"}, {"t": "last"}]})
    found: Any = await client.threads.search(
        ids=[thread_id],
        select=["thread_id"],
        extract={"last": "values.log[-1].t", "none": "values.log[7].t", "graph": "metadata.graph_id"},
    )
    assert found == [{"thread_id": thread_id, "extracted": {"last": "last", "none": None, "graph": "chat"}}]
    with pytest.raises(UnprocessableEntityError):
        await client.threads.search(extract={"x": "secrets[0"})


async def test_delete_ends_what_runs_and_leaves_nothing(api: Api, client: LangGraphClient) -> None:
    """Also when a run is being executed and another waits; the slots of the tenant are free again."""
    thread_id = (await client.threads.create())["thread_id"]
    await finished(api, thread_id, {"n": 1})
    running = await client.runs.create(thread_id, "chat", input={})
    run = await api.executor.claim(running["run_id"])
    await api.executor.snapshot(run, "c2", {"n": 2})
    await client.runs.create(thread_id, "chat", input={})
    await client.threads.delete(thread_id)
    for table in ("threads", "runs", "state_snapshots", "checkpoints", "state_blobs"):
        assert await api.sql(f"select 1 from {table} where thread_id::text = %s", thread_id) == [], table
    assert await api.sql("select 1 from journal where run_id = %s", run.fence.key.run_id) == []
    assert await api.sql("select slots, waiting from tenants where tenant = 'acme'") == [(0, 0)]
    for gone in (
        client.threads.get(thread_id),
        client.threads.get_state(thread_id),
        client.threads.get_history(thread_id),
        client.runs.list(thread_id),
        client.runs.get(thread_id, running["run_id"]),
        client.threads.delete(thread_id),
    ):
        with pytest.raises(NotFoundError):
            await gone


async def test_a_stream_of_a_deleted_run_ends(api: Api, client: LangGraphClient) -> None:
    thread_id = (await client.threads.create())["thread_id"]
    made = await client.runs.create(thread_id, "chat", input={})
    watching = asyncio.ensure_future(_events(client, thread_id, made["run_id"]))
    await api.executor.claim(made["run_id"])
    await client.threads.delete(thread_id)
    assert (await asyncio.wait_for(watching, 20))[-1:] in ([], ["end"])


async def _events(client: LangGraphClient, thread_id: str, run_id: str) -> list[str]:
    return [part.event async for part in client.runs.join_stream(thread_id, run_id, last_event_id="-1")]


async def test_copy_takes_the_states_along(api: Api, client: LangGraphClient) -> None:
    thread_id = (await client.threads.create(metadata={"a": 1}))["thread_id"]
    await finished(api, thread_id, {"n": 1}, "c1")
    await finished(api, thread_id, {"n": 2}, "c2", parent="c1")
    copied: Any = await client.threads.copy(thread_id)  # type: ignore[func-returns-value]
    assert copied["thread_id"] != thread_id
    assert (copied["values"], copied["metadata"]["a"]) == ({"n": 2}, 1)
    history = await client.threads.get_history(copied["thread_id"])
    assert [state["values"] for state in history] == [{"n": 2}, {"n": 1}]
    assert history[0]["checkpoint"]["thread_id"] == copied["thread_id"]
    assert await client.runs.list(copied["thread_id"]) == []
    await client.threads.delete(thread_id)
    assert (await client.threads.get(copied["thread_id"]))["values"] == {"n": 2}


async def test_a_copy_of_a_thread_that_is_answered_just_now_waits_for_its_answer(
    api: Api, client: LangGraphClient
) -> None:
    """The run stays behind. Red when what is busy is copied as if nothing were left to do."""
    thread_id = (await client.threads.create())["thread_id"]
    await client.runs.create(thread_id, "chat", input={})
    run = await api.executor.claim()
    question = [{"id": "i", "value": "Go on?"}]
    tasks = [{"id": "t", "name": "ask", "interrupts": question}]
    await api.executor.snapshot(run, "c1", {"n": 1}, following=["ask"], tasks=tasks)
    await api.executor.finish(run, 1, thread_status="interrupted", interrupts={"t": question})
    await client.runs.create(thread_id, "chat", command={"resume": "yes"})
    assert (await client.threads.get(thread_id))["status"] == "busy"
    copied: Any = await client.threads.copy(thread_id)  # type: ignore[func-returns-value]
    assert (copied["status"], copied["interrupts"]) == ("interrupted", {"t": question})


async def test_prune_counts_what_it_removed(client: LangGraphClient) -> None:
    made = [(await client.threads.create())["thread_id"] for _ in range(2)]
    assert await client.threads.prune([*made, str(uuid.uuid4())]) == {"pruned_count": 2}
    with pytest.raises(NotFoundError):
        await client.threads.get(made[0])
    with pytest.raises(UnprocessableEntityError):
        await client.threads.prune(made, strategy="keep_latest")


@pytest.mark.parametrize(
    "asked", [{"ttl": 5}, {"supersteps": [{"updates": [{"values": {}, "as_node": "a"}]}]}]
)
async def test_what_is_not_honoured_is_refused_by_name(client: LangGraphClient, asked: Any) -> None:
    with pytest.raises(UnprocessableEntityError, match=next(iter(asked))):
        await client.threads.create(**asked)
