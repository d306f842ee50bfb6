"""Streams, waits and joins: what the SDK needs to come back, and that nothing ends early in disguise."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient

from sandfleet.functions.api.app import create_app
from sandfleet.shared.store.claims import ClaimedRun
from tests.api.conftest import Api, make_settings, serve
from tests.waiting import eventually

BODY = {"assistant_id": "chat", "stream_mode": ["updates", "values"]}


@pytest.fixture
async def thread(client: LangGraphClient) -> str:
    return (await client.threads.create())["thread_id"]


async def work(api: Api, events: int = 3, *, end: bool = True, **ending: Any) -> ClaimedRun:
    """Claim the next run, emit so many updates, and end it."""
    run = await api.executor.claim()
    for n in range(1, events + 1):
        await api.executor.emit(run, n, "updates", {"n": n})
    if end:
        await api.executor.finish(run, events + 1, **ending)
    return run


def ids(text: str) -> list[str]:
    return [line[4:] for line in text.split("\r\n") if line.startswith("id: ")]


async def test_the_headers_say_where_to_come_back(http: httpx.AsyncClient, api: Api, thread: str) -> None:
    """Location is relative and below the thread, also for a stateless run, whose own path the SDK cannot ask."""
    for path in (
        f"/threads/{thread}/runs/stream",
        "/runs/stream",
        f"/threads/{thread}/runs/wait",
        "/runs/wait",
    ):
        working = asyncio.ensure_future(work(api))
        answer = await http.post(path, json=BODY)
        run = await working
        base = f"/threads/{run.thread_id}/runs/{run.fence.key.run_id}"
        suffix = "stream" if path.endswith("stream") else "join"
        assert answer.headers["location"] == f"{base}/{suffix}"
        assert answer.headers["content-location"] == base
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"


async def test_a_stream_begins_with_metadata_and_ends_with_end(
    http: httpx.AsyncClient, api: Api, thread: str
) -> None:
    working = asyncio.ensure_future(work(api))
    answer = await http.post(f"/threads/{thread}/runs/stream", json=BODY)
    await working
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ids(answer.text) == ["0-0", "1-0", "1-1", "1-2", "1-3", "1-4"]
    names = [line[7:] for line in answer.text.split("\r\n") if line.startswith("event: ")]
    assert names == ["metadata", "updates", "updates", "updates", "end"]


async def test_a_run_that_failed_streams_error_then_end(
    client: LangGraphClient, api: Api, thread: str
) -> None:
    working = asyncio.ensure_future(work(api, 1, error={"error": "ValueError", "message": "no"}))
    parts = [part async for part in client.runs.stream(thread, "chat")]
    await working
    assert [part.event for part in parts] == ["metadata", "updates", "error", "end"]
    assert parts[2].data == {"error": "ValueError", "message": "no"}


class Cutting(httpx.AsyncBaseTransport):
    """Breaks a response's body after so many of its chunks, once per number of the list."""

    def __init__(self, after: list[int]) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self._after = after
        self.requests: list[httpx.Request] = []

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = await self._inner.handle_async_request(request)
        if "/runs/" in request.url.path and request.url.path.endswith("stream") and self._after:
            inner, after = answer.stream, self._after.pop(0)

            class Body(httpx.AsyncByteStream):
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    seen = b""
                    async for chunk in inner:  # type: ignore[union-attr]
                        seen += chunk
                        whole = seen.split(b"\r\n\r\n")
                        if len(whole) > after:
                            yield b"".join(part + b"\r\n\r\n" for part in whole[:after])
                            raise httpx.ReadError("cut")
                        if not seen.endswith(b"\r\n\r\n"):
                            continue
                    yield seen

                async def aclose(self) -> None:
                    await inner.aclose()  # type: ignore[union-attr]

            return httpx.Response(answer.status_code, headers=answer.headers, stream=Body())
        return answer


@pytest.mark.parametrize("cut", range(1, 6))
async def test_the_sdk_gets_every_event_once_wherever_it_is_cut(
    api: Api, client: LangGraphClient, thread: str, cut: int
) -> None:
    """Cut before the first event it resumes from the start: the opening id says so. `cut` 1 breaks without it."""
    cutting = Cutting([cut])
    whole, client.http.client._transport = client.http.client._transport, cutting
    await whole.aclose()

    async def begin() -> None:
        if cut == 1:  # before there is any event
            await eventually(lambda: len(cutting.requests) > 1, what="the reconnect")
        await work(api)

    working = asyncio.ensure_future(begin())
    parts = [part async for part in client.runs.stream(thread, "chat", stream_mode="updates")]
    await working
    assert [part.id for part in parts] == ["1-0", "1-1", "1-2", "1-3", "1-4"]


async def test_a_join_replays_after_the_id_also_after_the_end(
    client: LangGraphClient, api: Api, thread: str
) -> None:
    made = await client.runs.create(thread, "chat")
    await work(api)

    async def joined(last: str | None) -> list[str | None]:
        return [p.id async for p in client.runs.join_stream(thread, made["run_id"], last_event_id=last)]

    everything = ["1-0", "1-1", "1-2", "1-3", "1-4"]
    for cursor, expected in (("-1", everything), ("0", everything), ("1-2", everything[3:]), ("1-4", [])):
        assert await joined(cursor) == expected
    assert await joined(None) in ([], ["1-4"])


async def test_a_join_filters_by_mode_and_keeps_the_filter_for_reconnects(
    http: httpx.AsyncClient, client: LangGraphClient, api: Api, thread: str
) -> None:
    """The SDK comes back without the query, so Location carries it. Repeated keys and JSON lists are united."""
    made = await client.runs.create(thread, "chat", stream_mode=["updates", "values", "custom"])
    run = await api.executor.claim()
    for n, event in enumerate(("values", "updates|a:1", "custom", "values|a:1"), 1):
        await api.executor.emit(run, n, event, {})
    await api.executor.finish(run, 5)
    path = f"/threads/{thread}/runs/{made['run_id']}/stream"
    for query in ("stream_mode=values&stream_mode=custom", 'stream_mode=["values","custom"]'):
        answer = await http.get(f"{path}?{query}", headers={"last-event-id": "-1"})
        names = [line[7:] for line in answer.text.split("\r\n") if line.startswith("event: ")]
        assert names == ["metadata", "values", "custom", "values|a:1", "end"]
        assert answer.headers["location"] == f"{path}?stream_mode=values&stream_mode=custom"
    assert (await http.get(f"{path}?stream_mode=")).headers["location"] == path
    assert (await http.get(f"{path}?stream_mode=lifecycle")).status_code == 422


async def test_a_run_is_streamed_below_its_own_path_too(
    http: httpx.AsyncClient, client: LangGraphClient, api: Api
) -> None:
    made = await client.runs.create(None, "chat")
    await work(api)
    answer = await http.get(f"/runs/{made['run_id']}/stream", headers={"last-event-id": "-1"})
    assert ids(answer.text)[-1] == "1-4"
    assert answer.headers["location"].startswith("/threads/")


async def test_a_quiet_stream_is_kept_open_by_comments(
    http: httpx.AsyncClient, client: LangGraphClient, thread: str
) -> None:
    made = await client.runs.create(thread, "chat", after_seconds=60)
    async with http.stream("GET", f"/threads/{thread}/runs/{made['run_id']}/stream") as answer:
        chunks = answer.aiter_text()
        assert ": heartbeat" in await asyncio.wait_for(anext(chunks), 20)


async def test_wait_answers_with_the_runs_values(client: LangGraphClient, api: Api, thread: str) -> None:
    async def go() -> None:
        run = await api.executor.claim()
        await api.executor.snapshot(run, "c1", {"n": 1})
        await api.executor.finish(run, 1, output={"checkpoint_id": "c1", "interrupts": {}})

    working = asyncio.ensure_future(go())
    created: list[Any] = []
    values = await client.runs.wait(thread, "chat", on_run_created=created.append)
    await working
    assert values == {"n": 1}
    assert created[0]["thread_id"] == thread


async def test_wait_reports_interrupts_and_errors(client: LangGraphClient, api: Api, thread: str) -> None:
    async def interrupt() -> None:
        run = await api.executor.claim()
        await api.executor.snapshot(run, "c1", {"n": 1}, following=["a"])
        interrupts = {"t": [{"id": "i1", "value": "ok?"}]}
        await api.executor.finish(
            run,
            1,
            output={"checkpoint_id": "c1", "interrupts": interrupts},
            thread_status="interrupted",
            interrupts=interrupts,
        )

    working = asyncio.ensure_future(interrupt())
    values = await client.runs.wait(thread, "chat")
    await working
    assert values == {"n": 1, "__interrupt__": [{"id": "i1", "value": "ok?", "response_schema": None}]}
    found = await client.threads.get(thread)
    assert (found["status"], found["interrupts"]) == ("interrupted", {"t": [{"id": "i1", "value": "ok?"}]})
    failing = asyncio.ensure_future(work(api, 0, error={"error": "ValueError", "message": "no"}))
    with pytest.raises(Exception, match="ValueError: no"):
        await client.runs.wait(thread, "chat")
    await failing


async def test_join_reports_the_runs_own_outcome_not_the_threads(
    client: LangGraphClient, api: Api, thread: str
) -> None:
    """A later failure of the thread does not change what an earlier run came to."""
    first = await client.runs.create(thread, "chat")
    run = await api.executor.claim()
    await api.executor.snapshot(run, "c1", {"n": 1})
    await api.executor.finish(run, 1, output={"checkpoint_id": "c1", "interrupts": {}})
    second = await client.runs.create(thread, "chat")
    run = await api.executor.claim()
    await api.executor.snapshot(run, "c2", {"n": 2})
    await api.executor.finish(run, 1, error={"error": "E", "message": "no"})
    assert await client.runs.join(thread, first["run_id"]) == {"n": 1}
    assert await client.runs.join(thread, second["run_id"]) == {"__error__": {"error": "E", "message": "no"}}


async def test_join_of_an_unknown_run_is_a_real_404(http: httpx.AsyncClient, thread: str) -> None:
    """For the waiting and the streaming form: a body in 200 could not say so to the SDK."""
    for form in ("join", "stream"):
        path = f"/threads/{thread}/runs/1ef4a9b8-e6fb-67b1-8001-abd5184439d1/{form}"
        assert (await http.get(path)).status_code == 404


async def test_wait_of_a_run_that_is_rolled_back_says_so(
    client: LangGraphClient, api: Api, thread: str
) -> None:
    waiting = asyncio.ensure_future(client.runs.wait(thread, "chat", raise_error=False))
    run = await api.executor.claim()
    await api.executor.finish(run, 1, status="interrupted", thread_status=None, rollback=True)
    assert "__error__" in await waiting


async def test_a_waiting_response_is_padded(
    http: httpx.AsyncClient, api: Api, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space keeps proxies and clients patient; the body is JSON all the same."""
    monkeypatch.setattr("sandfleet.functions.api.live._PAD_EVERY_S", 0.05)
    async with http.stream("POST", f"/threads/{thread}/runs/wait", json=BODY) as answer:
        chunks = answer.aiter_bytes()
        assert await asyncio.wait_for(anext(chunks), 20) == b"\n"
        await work(api, 0)
        rest = b"".join([chunk async for chunk in chunks])
    assert json.loads(rest) == {}


async def test_when_the_process_stops_streams_close_and_waits_break(
    database: str, redis_url: str, api: Api, thread: str
) -> None:
    """A stream may end early, its client asks how the run stands; a wait must not, or half an answer is an answer."""
    app = create_app(make_settings(database, redis_url))
    async with (
        serve(app) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}) as http,
        http.stream("POST", f"/threads/{thread}/runs/stream", json=BODY) as stream,
    ):
        run_id = stream.headers["content-location"].rsplit("/", 1)[1]
        async with http.stream("GET", f"/threads/{thread}/runs/{run_id}/join") as wait:
            app.state.resources.closing.set()
            text = (await stream.aread()).decode()
            with pytest.raises(httpx.RemoteProtocolError):
                await wait.aread()
    assert "event: end" not in text
    assert (await api.sql("select status from runs where run_id = %s", run_id)) == [("pending",)]


async def test_a_window_ends_a_stream_without_end_and_breaks_a_wait(
    database: str, redis_url: str, api: Api, thread: str
) -> None:
    """It opens with `metadata` without an id: progress for the SDK, which gives up after five windows of nothing."""
    app = create_app(make_settings(database, redis_url, response_window_s=0.3))
    async with serve(app) as url, httpx.AsyncClient(base_url=url, headers={"x-api-key": api.alice}) as http:
        opened = (await http.post(f"/threads/{thread}/runs/stream", json=BODY)).text
        run = await work(api, 2, end=False)
        path = f"/threads/{thread}/runs/{run.fence.key.run_id}"
        resumed = (await http.get(f"{path}/stream", headers={"last-event-id": "1-1"})).text
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"{path}/join")
    assert ids(opened) == ["0-0"]
    assert "event: metadata" in opened
    assert "event: end" not in opened
    assert ids(resumed) == ["1-2"]
    await api.executor.finish(run, 3)


async def test_the_sdk_streams_through_windows(
    database: str, redis_url: str, api: Api, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows that end cleanly in the middle of a run: it asks how the run stands, comes back, misses nothing."""
    monkeypatch.setattr("langgraph_sdk._async.http._reconnect_delay", lambda *_, **__: 0.0)
    app = create_app(make_settings(database, redis_url, response_window_s=0.4))
    async with serve(app) as url:
        api_of_windows = Api(url, app, database, redis_url, api.alice, api.bob, api.eve, api.executor)
        async with api_of_windows.client() as client:
            seen: list[Any] = []
            gates = {"1-1": asyncio.Event(), "1-2": asyncio.Event()}

            async def go() -> None:
                run = await api.executor.claim()
                await api.executor.emit(run, 1, "updates", {})
                await asyncio.wait_for(gates["1-1"].wait(), 20)
                await api.executor.emit(run, 2, "updates", {})
                await asyncio.wait_for(gates["1-2"].wait(), 20)
                await api.executor.finish(run, 3)

            working = asyncio.ensure_future(go())
            last: str | None = None
            async for part in client.runs.stream(thread, "chat", stream_mode="updates"):
                if part.event == "metadata" and "attempt" not in part.data:
                    if last in gates:
                        gates[last].set()  # the next window has begun
                    continue
                last = part.id
                seen.append(part.id)
            await working
    assert seen == ["1-0", "1-1", "1-2", "1-3"]


async def _stream_until_running(http: httpx.AsyncClient, api: Api, path: str, body: Any) -> ClaimedRun:
    """Start a run, see it begin, and go away."""
    async with http.stream("POST", path, json=body) as answer:
        run = await api.executor.claim()
        async for text in answer.aiter_text():
            if "event: metadata" in text:
                return run
    raise AssertionError("the stream ended")


async def test_a_lost_client_cancels_the_run_if_it_asked_for_that(
    http: httpx.AsyncClient, api: Api, thread: str
) -> None:
    run = await _stream_until_running(
        http, api, f"/threads/{thread}/runs/stream", {**BODY, "on_disconnect": "cancel"}
    )
    await eventually(
        lambda: api.sql(
            "select 1 from runs where run_id = %s and cancel_action is not null", run.fence.key.run_id
        )
    )
    await api.executor.finish(run, 1, status="interrupted")


async def test_a_client_that_comes_back_in_time_keeps_the_run(
    http: httpx.AsyncClient, api: Api, thread: str
) -> None:
    """Three times the grace period after the loss, nothing is asked for; when the second one leaves, it is.

    Breaks without the look whether the mark is still one's own.
    """
    run = await _stream_until_running(
        http, api, f"/threads/{thread}/runs/stream", {**BODY, "on_disconnect": "cancel"}
    )
    run_id = run.fence.key.run_id
    cancelled = "select cancel_action from runs where run_id = %s"
    path = f"/threads/{thread}/runs/{run_id}/stream"
    async with http.stream("GET", path, headers={"last-event-id": "1-0"}) as again:
        heartbeats = 0
        async for text in again.aiter_text():
            heartbeats += text.count(": heartbeat")
            if heartbeats >= 5:  # 0.2 s each: over three times the grace period of 0.3 s
                break
        assert await api.sql(cancelled, run_id) == [(None,)]
    await eventually(lambda: api.sql(f"{cancelled} and cancel_action is not null", run_id))
    await api.executor.finish(run, 1, status="interrupted")


async def test_by_default_a_run_goes_on_without_its_client(
    http: httpx.AsyncClient, api: Api, thread: str
) -> None:
    """Broken by watching every client, also those that did not ask for it."""
    run = await _stream_until_running(http, api, f"/threads/{thread}/runs/stream", BODY)
    found = api.app.state.resources
    await eventually(lambda: run.fence.key not in found.hub._watched, what="the end of the response")
    assert not found._tasks
    await api.executor.finish(run, 1)
    assert await api.sql("select status from runs where run_id = %s", run.fence.key.run_id) == [("success",)]


async def test_cancel_on_disconnect_of_a_join_is_kept_for_reconnects(
    http: httpx.AsyncClient, client: LangGraphClient, api: Api, thread: str
) -> None:
    made = await client.runs.create(thread, "chat")
    run = await api.executor.claim(made["run_id"])
    path = f"/threads/{thread}/runs/{made['run_id']}/stream"
    async with http.stream("GET", path, params={"cancel_on_disconnect": "true"}) as answer:
        assert answer.headers["location"] == f"{path}?cancel_on_disconnect=true"
    await eventually(
        lambda: api.sql("select 1 from runs where run_id = %s and cancel_action is not null", made["run_id"])
    )
    await api.executor.finish(run, 1, status="interrupted")
