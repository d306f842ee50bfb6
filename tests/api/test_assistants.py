"""Assistants through the SDK."""

import uuid

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)

from sandfleet.shared.ids import graph_assistant_id
from tests.api.conftest import DRAWINGS, SCHEMAS, Api

CHAT = str(graph_assistant_id("chat"))


async def test_a_deployment_brings_one_assistant_per_graph(client: LangGraphClient) -> None:
    found = await client.assistants.search(metadata={"created_by": "system"}, graph_id="chat")
    assert [(a["assistant_id"], a["name"], a["version"]) for a in found] == [(CHAT, "chat", 1)]


async def test_an_assistant_is_created_with_defaults_and_read_back(client: LangGraphClient) -> None:
    made = await client.assistants.create("chat")
    assert (made["name"], made["version"], made["metadata"], made["config"]) == ("Untitled", 1, {}, {})
    assert await client.assistants.get(made["assistant_id"]) == made


async def test_configurable_and_context_mirror_each_other(client: LangGraphClient) -> None:
    by_config = await client.assistants.create("chat", config={"configurable": {"tone": "dry"}})
    by_context = await client.assistants.create("chat", context={"tone": "dry"})
    for made in (by_config, by_context):
        assert made["config"]["configurable"] == made["context"] == {"tone": "dry"}
    with pytest.raises(BadRequestError):
        await client.assistants.create("chat", config={"configurable": {"a": 1}}, context={"b": 1})


async def test_an_id_is_taken_once(client: LangGraphClient) -> None:
    """409, unless asked to do nothing: then the old one comes back unchanged."""
    chosen = str(uuid.uuid4())
    first = await client.assistants.create("chat", assistant_id=chosen, name="first")
    with pytest.raises(ConflictError):
        await client.assistants.create("chat", assistant_id=chosen, name="second")
    again = await client.assistants.create("other", assistant_id=chosen, if_exists="do_nothing")
    assert again == first


async def test_the_id_of_a_deployments_assistant_is_taken_too(client: LangGraphClient) -> None:
    """Else a user could shadow the graph's own assistant for himself. Breaks without the `where not exists`."""
    with pytest.raises(ConflictError):
        await client.assistants.create("other", assistant_id=CHAT)


async def test_an_unknown_graph_is_not_found(client: LangGraphClient) -> None:
    with pytest.raises(NotFoundError):
        await client.assistants.create("nothing-like-it")


async def test_every_update_makes_a_version(client: LangGraphClient) -> None:
    """Metadata is merged, config replaced, an empty update counts; versions come newest first."""
    made = await client.assistants.create(
        "chat", metadata={"a": 1}, config={"recursion_limit": 7}, name="one"
    )
    key = made["assistant_id"]
    await client.assistants.update(key, metadata={"b": 2}, context={"tone": "dry"}, name="two")
    updated = await client.assistants.update(key)
    assert updated["version"] == 3
    assert updated["metadata"] == {"a": 1, "b": 2}
    assert updated["config"] == {"configurable": {"tone": "dry"}}
    assert [v["version"] for v in await client.assistants.get_versions(key)] == [3, 2, 1]
    assert [v["version"] for v in await client.assistants.get_versions(key, metadata={"b": 2})] == [3, 2]


async def test_an_older_version_comes_back_whole(client: LangGraphClient) -> None:
    """Also its context, which the reference server forgets; the next version's number is new."""
    made = await client.assistants.create("chat", context={"tone": "dry"}, name="one")
    key = made["assistant_id"]
    await client.assistants.update(key, context={"tone": "sweet"}, name="two", graph_id="other")
    back = await client.assistants.set_latest(key, 1)
    assert (back["version"], back["context"], back["graph_id"]) == (1, {"tone": "dry"}, "chat")
    assert (await client.assistants.update(key))["version"] == 3
    with pytest.raises(NotFoundError):
        await client.assistants.set_latest(key, 99)


async def test_a_deployments_assistant_cannot_be_changed(client: LangGraphClient) -> None:
    with pytest.raises(PermissionDeniedError):
        await client.assistants.update(CHAT, name="mine")
    with pytest.raises(PermissionDeniedError):
        await client.assistants.delete(CHAT)
    assert [v["version"] for v in await client.assistants.get_versions(CHAT)] == [1]


async def test_search_filters_sorts_and_pages(client: LangGraphClient) -> None:
    mark = uuid.uuid4().hex
    for name in ("alpha", "BETA", "gamma_"):
        await client.assistants.create("other", name=f"{name}{mark}", metadata={"mark": mark})
    names = [a["name"].removesuffix(mark) for a in await client.assistants.search(metadata={"mark": mark})]
    assert names == ["gamma_", "BETA", "alpha"]
    by_name = await client.assistants.search(
        name=f"A{mark}"[:20], metadata={"mark": mark}, sort_by="name", sort_order="asc", select=["name"]
    )
    assert [a["name"].removesuffix(mark) for a in by_name] == ["alpha", "BETA"] or len(by_name) == 2
    page = await client.assistants.search(metadata={"mark": mark}, limit=2, response_format="object")
    assert (len(page["assistants"]), page["next"]) == (2, "2")
    last = await client.assistants.search(
        metadata={"mark": mark}, limit=2, offset=2, response_format="object"
    )
    assert (len(last["assistants"]), last["next"]) == (1, None)
    assert await client.assistants.count(metadata={"mark": mark}) == 3


async def test_percent_and_underscore_in_a_name_are_no_wildcards(client: LangGraphClient) -> None:
    assert await client.assistants.count(name="%") == 0
    assert await client.assistants.count(name="c_at") == 0


async def test_the_graph_is_drawn_by_depth_and_by_name(client: LangGraphClient) -> None:
    assert await client.assistants.get_graph("chat") == DRAWINGS["0"]
    assert await client.assistants.get_graph(CHAT, xray=True) == DRAWINGS["1"]
    assert await client.assistants.get_graph(CHAT, xray=7) == DRAWINGS["1"]
    with pytest.raises(NotFoundError):
        await client.assistants.get_graph("nothing-like-it")


async def test_schemas_are_read_by_id_only(client: LangGraphClient) -> None:
    assert await client.assistants.get_schemas(CHAT) == {"graph_id": "chat", **SCHEMAS}
    with pytest.raises(UnprocessableEntityError):
        await client.assistants.get_schemas("chat")


async def test_deleting_takes_the_threads_along_when_asked(api: Api, client: LangGraphClient) -> None:
    made = await client.assistants.create("chat")
    thread = await client.threads.create(metadata={"assistant_id": made["assistant_id"]})
    other = await client.threads.create()
    await client.assistants.delete(made["assistant_id"], delete_threads=True)
    for gone in (
        client.assistants.get(made["assistant_id"]),
        client.assistants.get_versions(made["assistant_id"]),
        client.threads.get(thread["thread_id"]),
    ):
        with pytest.raises(NotFoundError):
            await gone
    assert await client.threads.get(other["thread_id"])


async def test_select_of_an_unknown_field_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/assistants/search", json={"select": ["secret"]})
    assert answer.status_code == 422
    assert "select" in answer.json()["detail"]
