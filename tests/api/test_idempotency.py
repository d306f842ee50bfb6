"""`Idempotency-Key`: a creation that is sent again makes nothing new."""

import asyncio
import uuid

import httpx
import pytest

from tests.api.conftest import Api
from tests.waiting import eventually


async def _thread(http: httpx.AsyncClient) -> str:
    return str((await http.post("/threads", json={})).json()["thread_id"])


async def test_the_same_request_gets_the_same_run_also_at_once(api: Api, http: httpx.AsyncClient) -> None:
    """Twenty copies in flight together. Breaks when the key is looked up outside the submitting transaction."""
    thread, key = await _thread(http), uuid.uuid4().hex
    answers = await asyncio.gather(
        *(
            http.post(
                f"/threads/{thread}/runs", json={"assistant_id": "chat"}, headers={"idempotency-key": key}
            )
            for _ in range(20)
        )
    )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["run_id"] for answer in answers}) == 1
    assert len({answer.headers["content-location"] for answer in answers}) == 1
    assert await api.sql("select count(*) from runs where thread_id = %s", thread) == [(1,)]


async def test_a_replay_wakes_an_executor_as_long_as_nobody_has_taken_the_run(
    api: Api, http: httpx.AsyncClient
) -> None:
    """The API that accepted the run may have died before it woke anybody. Red when the run waits for the end of a long
    poll, or when each replay rings for a run that is under way."""
    thread, headers = await _thread(http), {"idempotency-key": uuid.uuid4().hex}
    redis = api.app.state.resources.redis

    async def submit() -> str:
        await redis.delete("sf:ring:default")
        answer = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat"}, headers=headers)
        return str(answer.json()["run_id"])

    run_id = await submit()
    await eventually(lambda: redis.llen("sf:ring:default"), what="the first ring")
    assert await submit() == run_id
    assert await eventually(lambda: redis.llen("sf:ring:default"), what="a ring by the replay") == 1
    run = await api.executor.claim(run_id)
    assert await submit() == run_id
    await api.app.state.resources.waker.flush()
    assert await redis.llen("sf:ring:default") == 0
    await api.executor.finish(run, 1)


async def test_another_body_under_the_same_key_is_refused(http: httpx.AsyncClient) -> None:
    thread, headers = await _thread(http), {"idempotency-key": uuid.uuid4().hex}
    first = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat"}, headers=headers)
    other = await http.post(
        f"/threads/{thread}/runs", json={"assistant_id": "chat", "input": 1}, headers=headers
    )
    elsewhere = await http.post("/runs", json={"assistant_id": "chat"}, headers=headers)
    assert (first.status_code, other.status_code, elsewhere.status_code) == (200, 409, 409)


async def test_a_key_is_its_users_own(api: Api, http: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": uuid.uuid4().hex}
    mine = await http.post("/runs", json={"assistant_id": "chat"}, headers=headers)
    async with api.http(api.bob) as bob:
        his = await bob.post("/runs", json={"assistant_id": "chat"}, headers=headers)
    assert mine.json()["run_id"] != his.json()["run_id"]


async def test_a_stream_that_is_asked_for_again_is_the_same_run_from_its_start(
    api: Api, http: httpx.AsyncClient
) -> None:
    headers = {"idempotency-key": uuid.uuid4().hex}
    body = {"assistant_id": "chat", "on_completion": "keep"}
    async with http.stream("POST", "/runs/stream", json=body, headers=headers) as first:
        location = first.headers["location"]
        run = await api.executor.claim()
    await api.executor.finish(run, 1)
    again = await http.post("/runs/stream", json=body, headers=headers)
    assert again.headers["location"] == location
    assert [line for line in again.text.split("\r\n") if line.startswith("event")] == [
        "event: metadata",
        "event: end",
    ]


async def test_the_key_of_a_deleted_run_makes_no_second_one(http: httpx.AsyncClient) -> None:
    thread, headers = await _thread(http), {"idempotency-key": uuid.uuid4().hex}
    made = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat"}, headers=headers)
    await http.delete(f"/threads/{thread}/runs/{made.json()['run_id']}")
    again = await http.post(f"/threads/{thread}/runs", json={"assistant_id": "chat"}, headers=headers)
    assert again.status_code == 409


@pytest.mark.parametrize("key", ["", "x" * 256, "with space", "\xe4"])
async def test_a_key_that_cannot_be_kept_is_refused(http: httpx.AsyncClient, key: str) -> None:
    headers = [(b"idempotency-key", key.encode("latin-1"))]
    assert (await http.post("/runs", json={"assistant_id": "chat"}, headers=headers)).status_code == 422
