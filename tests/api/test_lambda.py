"""The API as a Lambda: events of both API Gateway payload versions, in a process of its own as the runtime has it."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.api.conftest import Api
from tests.waiting import eventually

# Modules that a cold start must not pay for.
FORBIDDEN = [
    "langgraph",
    "langchain",
    "langchain_core",
    "langgraph_sdk",
    "docker",
    "aiodocker",
    "aiohttp",
    "alembic",
    "sqlalchemy",
    "boto3",
    "aiobotocore",
    "uvicorn",
    "httpx",
    "openai",
]
MOST_MODULES = 900  # 730 when this was written; each costs about a millisecond of a cold start


def rest_event(
    method: str, path: str, key: str, body: Any = None, query: dict[str, list[str]] | None = None
) -> Any:
    """An event of a REST API (payload version 1.0) whose binary media types are all: the body comes as base64."""
    return {
        "resource": "/{proxy+}",
        "path": path,
        "httpMethod": method,
        "headers": {"x-api-key": key, "host": "api.example"},
        "multiValueHeaders": {"x-api-key": [key], "host": ["api.example"]},
        "queryStringParameters": {k: v[-1] for k, v in (query or {}).items()} or None,
        "multiValueQueryStringParameters": query,
        "requestContext": {
            "resourcePath": "/{proxy+}",
            "httpMethod": method,
            "stage": "prod",
            "identity": {},
        },
        "body": None if body is None else base64.b64encode(json.dumps(body).encode()).decode(),
        "isBase64Encoded": body is not None,
    }


def http_event(
    method: str, path: str, key: str, body: Any = None, query: str = "", stage: str = "$default"
) -> Any:
    """An event of an HTTP API (payload version 2.0); the body comes as base64, which it may."""
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": query,
        "headers": {"x-api-key": key, "host": "api.example"},
        "requestContext": {
            "stage": stage,
            "http": {"method": method, "path": path, "protocol": "HTTP/1.1", "sourceIp": "127.0.0.1"},
        },
        "body": None if body is None else base64.b64encode(json.dumps(body).encode()).decode(),
        "isBase64Encoded": body is not None,
    }


@dataclass
class Function:
    """The function's process."""

    process: asyncio.subprocess.Process

    async def __call__(self, event: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(event).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())


@pytest.fixture(scope="module")
async def function(api: Api) -> AsyncIterator[Function]:
    """A started function with a window of one second."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.api.lambda_runtime",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=10 * 1024 * 1024,
        env={
            **os.environ,
            "DATABASE_URL": api.database_url,
            "REDIS_URL": api.redis_url,
            "SANDFLEET_RESPONSE_WINDOW_S": "1",
        },
    )
    yield Function(process)
    assert process.stdin is not None
    process.stdin.close()
    await asyncio.wait_for(process.wait(), 20)


@pytest.mark.parametrize("event", [rest_event, http_event])
async def test_requests_of_both_payload_versions(api: Api, function: Function, event: Any) -> None:
    """Created, read, searched; an unknown key is 401, an unknown path 404."""
    made = await function(event("POST", "/threads", api.alice, {"metadata": {"via": event.__name__}}))
    assert made["statusCode"] == 200
    thread = json.loads(made["body"])
    read = await function(event("GET", f"/threads/{thread['thread_id']}", api.alice))
    assert json.loads(read["body"]) == thread
    found = await function(event("POST", "/threads/search", api.alice, {"metadata": {"via": event.__name__}}))
    assert [t["thread_id"] for t in json.loads(found["body"])] == [thread["thread_id"]]
    assert found["headers"]["x-pagination-total"] == "1"
    assert (await function(event("GET", "/assistants/chat/graph", "wrong")))["statusCode"] == 401
    assert (await function(event("GET", "/nothing", api.alice)))["statusCode"] == 404
    assert (await function(event("GET", f"/threads/{thread['thread_id']}", api.bob)))["statusCode"] == 404


async def test_the_query_arrives_whole(api: Api, function: Function) -> None:
    thread = json.loads((await function(http_event("POST", "/threads", api.alice, {})))["body"])["thread_id"]
    path = f"/threads/{thread}/runs"
    await function(http_event("POST", path, api.alice, {"assistant_id": "chat"}))
    for event in (
        rest_event("GET", path, api.alice, query={"select": ["run_id", "status"], "limit": ["1"]}),
        http_event("GET", path, api.alice, query="select=run_id&select=status&limit=1"),
    ):
        assert [sorted(run) for run in json.loads((await function(event))["body"])] == [["run_id", "status"]]


async def test_the_name_of_an_http_apis_stage_is_no_part_of_the_path(api: Api, function: Function) -> None:
    answer = await function(http_event("GET", "/prod/ok", api.alice, stage="prod"))
    assert json.loads(answer["body"]) == {"ok": True}
    answer = await function(http_event("GET", "/ok", api.alice, stage="prod"))
    assert json.loads(answer["body"]) == {"ok": True}


async def test_text_is_answered_as_text(api: Api, function: Function) -> None:
    """API Gateway decodes what is said to be base64. Red when an answer is said to be so and is not, or is it needlessly."""
    for path in ("/ok", "/openapi.json", "/docs"):
        answer = await function(rest_event("GET", path, api.alice))
        assert (answer["statusCode"], answer["isBase64Encoded"]) == (200, False), path


async def test_executors_are_rung_before_the_answer(api: Api, function: Function) -> None:
    """The function is frozen behind its answer: what is left for later may never happen."""
    redis = api.app.state.resources.redis
    await redis.delete("sf:ring:default")
    made = await function(rest_event("POST", "/runs", api.alice, {"assistant_id": "chat"}))
    assert made["statusCode"] == 200
    assert await redis.llen("sf:ring:default") == 1


async def test_a_stream_is_a_window_that_resumes_by_id(api: Api, function: Function) -> None:
    """The first window opens with metadata and ends without `end`; the next goes on, up to it."""
    starting = asyncio.ensure_future(
        function(rest_event("POST", "/runs/stream", api.alice, {"assistant_id": "chat"}))
    )
    run = await api.executor.claim()
    first = await starting
    assert first["headers"]["content-type"].startswith("text/event-stream")
    assert "event: metadata" in first["body"]
    assert "event: end" not in first["body"]
    await api.executor.emit(run, 1, "updates", {"n": 7})
    await api.executor.finish(run, 2)
    event = http_event("GET", first["headers"]["location"], api.alice)
    event["headers"]["last-event-id"] = "1-0"
    second = await function(event)
    assert '{"n": 7}' in second["body"]
    assert second["body"].rstrip().endswith("id: 1-2")


async def test_a_wait_that_takes_too_long_says_where_to_go_on(api: Api, function: Function) -> None:
    """503, never a 200 with half a body: the SDK would take that for the outcome."""
    starting = asyncio.ensure_future(
        function(rest_event("POST", "/runs/wait", api.alice, {"assistant_id": "chat"}))
    )
    run = await api.executor.claim()
    late = await starting
    assert late["statusCode"] == 503
    assert late["headers"]["retry-after"]
    await api.executor.snapshot(run, "c1", {"n": 1})
    await api.executor.finish(run, 1, output={"checkpoint_id": "c1", "interrupts": {}})
    joined = await function(rest_event("GET", late["headers"]["location"], api.alice))
    assert (joined["statusCode"], json.loads(joined["body"])) == (200, {"n": 1})


async def test_connections_that_were_cut_while_it_was_frozen_are_replaced(
    api: Api, function: Function
) -> None:
    await function(rest_event("POST", "/threads", api.alice, {}))
    ended = await api.sql(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sandfleet-api'"
    )
    assert ended
    await eventually(
        lambda: api.sql(
            "select 1 where not exists (select 1 from pg_stat_activity where application_name = 'sandfleet-api' and state = 'active')"
        )
    )
    assert (await function(rest_event("POST", "/threads", api.alice, {})))["statusCode"] == 200


def test_importing_the_handler_loads_nothing_heavy() -> None:
    """Breaks when the API begins to import an engine, a client of AWS, or its migrations."""
    code = (
        "import sys, json, sandfleet.functions.api.lambda_handler; json.dump(sorted(sys.modules), sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout)
    heavy = {name.partition(".")[0] for name in modules} & set(FORBIDDEN)
    assert heavy == set()
    assert len(modules) <= MOST_MODULES
