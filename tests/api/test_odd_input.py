"""Input that PostgreSQL or JSON cannot hold, too large, too deep, or of the wrong kind: a 4xx that names the field, or
it survives exactly. Never a 500."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from langgraph_sdk.errors import NotFoundError

from tests.api.conftest import Api

NUL = "a\x00b"


@pytest.fixture
async def thread(client: LangGraphClient) -> str:
    return (await client.threads.create())["thread_id"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b'"text"', 422),
        (b"null", 422),
        (b'{"assistant_id": "chat", "input": NaN}', 422),
        (b'{"assistant_id": "chat", "input": 1e999}', 422),
        (b'{"assistant_id": "chat", "input": "\\ud800"}', 422),
        (b'{"assistant_id": "chat", "input": "\xff"}', 422),
        (b'{"assistant_id": "chat", "input": "\xed\xa0\x80"}', 422),
        (b'{"assistant_id": "chat", "input": ' + b"[" * 500 + b"]" * 500 + b"}", 400),
        (b'{"assistant_id": "chat", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b'{"assistant_id": "chat", "input": "' + b"x" * 2_200_000 + b'"}', 413),
        (b'{"assistant_id": 1}', 422),
        (b'{"assistant_id": ""}', 422),
        (b'{"assistant_id": "no\\u0000graph"}', 422),
        (b'{"assistant_id": "chat", "unknown": 1}', 200),
        (b'{"assistant_id": "chat", "input": null, "command": null}', 200),
    ],
)
async def test_bodies_of_runs(http: httpx.AsyncClient, thread: str, body: bytes, status: int) -> None:
    answer = await http.post(f"/threads/{thread}/runs", content=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert isinstance(answer.json()["detail"], str)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, None)
            for name in [
                "assistant_id",
                "stream_mode",
                "metadata",
                "config",
                "context",
                "checkpoint",
                "checkpoint_id",
                "webhook",
                "after_seconds",
                "multitask_strategy",
                "on_disconnect",
                "if_not_exists",
                "interrupt_before",
                "interrupt_after",
                "durability",
                "stream_subgraphs",
                "stream_resumable",
                "on_completion",
                "checkpoint_during",
                "feedback_keys",
            ]
        ),
        ("stream_mode", "everything"),
        ("stream_mode", ["values", "events"]),
        ("stream_mode", "lifecycle"),
        ("stream_subgraphs", "true"),
        ("multitask_strategy", "both"),
        ("on_disconnect", "panic"),
        ("if_not_exists", "maybe"),
        ("durability", "always"),
        ("after_seconds", -1),
        ("after_seconds", 1e300),
        ("after_seconds", "5"),
        ("after_seconds", True),
        ("interrupt_before", "node"),
        ("interrupt_before", [1]),
        ("metadata", {"k": NUL}),
        ("metadata", {NUL: 1}),
        ("metadata", {"deep": [{"x": [NUL]}]}),
        ("metadata", []),
        ("config", {"recursion_limit": 0}),
        ("config", {"recursion_limit": 2**40}),
        ("config", {"recursion_limit": "7"}),
        ("config", {"tags": "t"}),
        ("config", {"configurable": None}),
        ("config", {"metadata": {"k": NUL}}),
        ("config", {"configurable": {"checkpoint_id": 7}}),
        ("command", {"goto": 1}),
        ("command", {"goto": [{"input": 1}]}),
        ("command", {"update": [["only-key"]]}),
        ("command", "resume"),
        ("checkpoint", {"checkpoint_id": NUL}),
        ("checkpoint", {"thread_id": "other"}),
        ("checkpoint", {"checkpoint_map": None}),
        ("checkpoint_id", NUL),
        ("schedule", "* * * * *"),
    ],
)
async def test_a_wrong_field_of_a_run_is_named(
    http: httpx.AsyncClient, thread: str, field: str, value: Any
) -> None:
    answer = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat", field: value})
    assert answer.status_code == 422, answer.text
    assert field in answer.json()["detail"]


async def test_an_error_never_repeats_the_value(http: httpx.AsyncClient, thread: str) -> None:
    """Tenants' data stays out of messages, which end up in logs."""
    answer = await http.post(
        f"/threads/{thread}/runs",
        json={"assistant_id": "chat", "metadata": "s3cret", "config": {"tags": "s3cret"}},
    )
    assert "s3cret" not in answer.text


async def test_what_json_can_say_survives_in_input(api: Api, http: httpx.AsyncClient, thread: str) -> None:
    """U+0000, astral characters, empty keys, 64-bit integers; larger ones become floats."""
    value = {
        "": NUL,
        "𝄞": [2**63 - 1, -(2**63), 2**64 - 1, 1e308, 5e-324, True, None],
        "\u2028": "\\u0000 \x7f",
    }
    answer = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat", "input": value})
    run_id = answer.json()["run_id"]
    assert answer.json()["kwargs"]["input"] == value
    assert (await http.get(f"/threads/{thread}/runs/{run_id}")).json()["kwargs"]["input"] == value
    run = await api.executor.claim(run_id)
    assert run.kwargs["input"] == value
    assert (await http.get(f"/runs/{run_id}/timing")).status_code == 200
    await api.executor.finish(run, 1, error={"error": "E", "message": NUL})
    joined = await http.get(f"/threads/{thread}/runs/{run_id}/join")
    assert joined.json() == {"__error__": {"error": "E", "message": NUL}}
    big = await http.post(
        "/runs", content=b'{"assistant_id": "chat", "input": 123456789012345678901234567890}'
    )
    assert big.json()["kwargs"]["input"] == 123456789012345678901234567890.0


async def test_a_megabyte_is_fine(http: httpx.AsyncClient, thread: str) -> None:
    body = json.dumps({"assistant_id": "chat", "input": "x" * 1_000_000}).encode()
    assert (await http.post(f"/threads/{thread}/runs", content=body)).status_code == 200


async def test_what_comes_behind_a_refused_body_is_read_for_a_while(api: Api, thread: str) -> None:
    """Bytes that stay unread reset the connection, and the refusal would be lost. Red when it is given at once."""
    taken = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal taken
        for taken in range(1, 41):
            yield b" " * 65536

    transport = httpx.ASGITransport(app=api.app)
    async with httpx.AsyncClient(transport=transport, base_url=api.url) as http:
        refused = await http.post(
            f"/threads/{thread}/runs", content=pieces(), headers={"x-api-key": api.alice}
        )
    assert (refused.status_code, taken) == (413, 40)


async def test_a_body_of_unknown_length_is_refused_while_it_is_read(api: Api, thread: str) -> None:
    """It never ends; the answer comes all the same, and the connection is closed. Breaks without the check per chunk."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rsplit(":", 1)[1]))
    head = f"POST /threads/{thread}/runs HTTP/1.1\r\nhost: x\r\nx-api-key: {api.alice}\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    answer = asyncio.ensure_future(reader.read())
    while not answer.done():
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        try:
            await asyncio.wait_for(writer.drain(), 20)
        except ConnectionError:
            break
        await asyncio.sleep(0)
    writer.close()
    try:
        assert b" 413 " in (await answer).split(b"\r\n")[0]
    except ConnectionError:
        pass  # closed with our bytes unread, which resets the connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/assistants", {"graph_id": "chat", "name": NUL}),
        ("/assistants", {"graph_id": "chat", "description": NUL}),
        ("/assistants", {"graph_id": NUL}),
        ("/assistants", {"graph_id": "chat", "assistant_id": "no-uuid"}),
        ("/assistants", {"graph_id": "chat", "assistant_id": None}),
        ("/assistants", {"graph_id": "chat", "if_exists": "replace"}),
        ("/assistants", {"graph_id": "chat", "metadata": None}),
        ("/assistants", {}),
        ("/assistants/search", {"name": NUL}),
        ("/assistants/search", {"graph_id": NUL}),
        ("/assistants/search", {"metadata": {"a": NUL}}),
        ("/assistants/search", {"limit": 0}),
        ("/assistants/search", {"limit": 1001}),
        ("/assistants/search", {"offset": -1}),
        ("/assistants/search", {"offset": 2**70}),
        ("/assistants/search", {"sort_by": "config"}),
        ("/assistants/count", {"name": None}),
        ("/threads", {"thread_id": "no-uuid"}),
        ("/threads", {"thread_id": 7}),
        ("/threads", {"metadata": {"a": NUL}}),
        ("/threads", {"metadata": None}),
        ("/threads", {"ttl": 7}),
        ("/threads/search", {"metadata": {NUL: 1}}),
        ("/threads/search", {"values": {"a": NUL}}),
        ("/threads/search", {"values": {NUL: 1}}),
        ("/threads/search", {"status": "lazy"}),
        ("/threads/search", {"status": None}),
        ("/threads/search", {"select": ["secret"]}),
        ("/threads/search", {"extract": {f"a{n}": "values.a" for n in range(11)}}),
        ("/threads/search", {"extract": {"a": "values.a[0"}}),
        ("/threads/prune", {"thread_ids": ["no-uuid"]}),
        ("/threads/prune", {}),
        ("/runs/cancel", {"status": "success"}),
        ("/threads/{thread}/state", {"checkpoint": {"checkpoint_map": None}}),
        ("/threads/{thread}/state", {"as_node": None}),
        ("/threads/{thread}/state", {"values": "text"}),
        ("/threads/{thread}/state/checkpoint", {}),
        ("/threads/{thread}/state/checkpoint", {"checkpoint": None}),
        ("/threads/{thread}/history", {"limit": 0}),
        ("/threads/{thread}/history", {"before": 7}),
        ("/threads/{thread}/history", {"before": {"configurable": {}}}),
        ("/threads/{thread}/history", {"select": ["nothing"]}),
    ],
)
async def test_wrong_bodies_of_other_routes_are_422(
    http: httpx.AsyncClient, thread: str, path: str, body: Any
) -> None:
    answer = await http.post(path.format(thread=thread), json=body)
    assert answer.status_code == 422, answer.text
    assert isinstance(answer.json()["detail"], str)


@pytest.mark.parametrize(
    "path",
    [
        "/threads/no-uuid",
        "/threads/%00",
        "/threads/no-uuid/runs",
        "/threads/no-uuid/state",
        "/threads/{thread}/runs/no-uuid",
        "/threads/{thread}/runs/no-uuid/stream",
        "/threads/{thread}/runs/no-uuid/join",
        "/threads/{thread}/runs?limit=0",
        "/threads/{thread}/runs?limit=x",
        "/threads/{thread}/runs?offset=99999999999999999999",
        "/threads/{thread}/runs?select=secret",
        "/threads/{thread}/state/no-uuid",
        "/threads/{thread}/state?subgraphs=perhaps",
        "/threads/{thread}/state?select=secret",
        "/threads/{thread}/history?limit=-1",
        "/threads/{thread}?include=ttl",
        "/runs/no-uuid",
        "/runs/no-uuid/timing",
        "/assistants/chat",
        "/assistants/chat/schemas",
        "/assistants/chat/graph?xray=deep",
    ],
)
async def test_wrong_paths_and_queries_are_422(http: httpx.AsyncClient, thread: str, path: str) -> None:
    answer = await http.get(path.format(thread=thread))
    assert answer.status_code == 422, answer.text


async def test_nul_in_ids_that_are_no_uuids_finds_nothing(http: httpx.AsyncClient, thread: str) -> None:
    body = {"before": {"checkpoint_id": NUL}}
    assert (await http.post(f"/threads/{thread}/history", json=body)).json() == []
    assert (await http.get(f"/threads/{thread}/history?before=%00")).json() == []
    assert (await http.get("/assistants/%00/graph")).status_code == 404


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"stream_mode": "nope"}, r"stream_mode: Input should be 'values', .*'tools', or a valid list"),
        (
            {"command": {"goto": 5}},
            r"command\.goto: Input should be a valid string, or a valid object, or a valid list",
        ),
        ({"config": "x"}, r"config: Input should be a valid object"),
        (
            {"interrupt_before": [1]},
            r"interrupt_before: .*; interrupt_before\.0: Input should be a valid string",
        ),
        ({"checkpoint": {"checkpoint_id": 7}}, r"checkpoint\.checkpoint_id: Input should be a valid string"),
    ],
)
async def test_a_field_of_several_types_is_named_once_by_its_place_in_the_body(
    http: httpx.AsyncClient, thread: str, body: dict[str, Any], detail: str
) -> None:
    """Whoever reads it knows neither our classes nor our validators. Fails when a problem's place is told as pydantic
    has it."""
    answer = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat", **body})
    assert answer.status_code == 422
    assert re.fullmatch(detail, answer.json()["detail"]), answer.text


async def test_a_status_that_no_run_can_have_is_refused(http: httpx.AsyncClient, thread: str) -> None:
    """Fails when it is looked up instead: none found looks like none there."""
    answer = await http.get(f"/threads/{thread}/runs", params={"status": "done"})
    assert (answer.status_code, answer.json()["detail"].split(":")[0]) == (422, "status")
    assert (await http.get(f"/threads/{thread}/runs", params={"status": "success"})).json() == []


async def test_what_of_the_sdk_is_not_offered_says_so(client: LangGraphClient, thread: str) -> None:
    """Red when a caller of the store is told no more than "Not Found"."""
    for call, what in (
        (lambda: client.store.get_item(("a",), "b"), "The store (client.store) is not offered"),
        (lambda: client.store.put_item(("a",), "b", {}), "The store (client.store) is not offered"),
        (lambda: client.store.search_items(("a",)), "The store (client.store) is not offered"),
        (lambda: client.crons.create("echo", schedule="* * * * *"), "Crons (client.crons) are not offered"),
        (
            lambda: client.crons.create_for_thread(thread, "echo", schedule="* * * * *"),
            "Crons (client.crons) are not",
        ),
    ):
        with pytest.raises(NotFoundError) as refused:
            await call()
        body = refused.value.response.json()
        assert body["code"] == "not_offered"
        assert what in body["detail"]
        assert "/openapi.json has all routes" in body["detail"]


async def test_a_path_without_a_route_and_a_method_without_one(http: httpx.AsyncClient) -> None:
    refused = await http.get("/treads")
    assert (refused.status_code, refused.json()["code"]) == (404, "not_offered")
    refused = await http.put("/threads")
    assert (refused.status_code, refused.json()["code"]) == (405, "method_not_allowed")
    assert refused.json()["detail"] == "This path does not take PUT, only POST."
