"""Streams as the SDK's clients see them: every event once, in order, whatever is cut off."""

import json

import httpx
import pytest

MODES = ["messages-tuple", "updates", "custom"]
PROMPT = {"messages": [{"role": "user", "content": 'hi #script:{"words": 30, "chunk_chars": 4}'}]}


async def events_of(stream):
    return [(e.id, e.event, json.dumps(e.data, sort_keys=True)) async for e in stream]


@pytest.fixture
async def run(client):
    """A finished run, with all that its own stream has given."""
    thread = await client.threads.create()
    created = []
    events = await events_of(
        client.runs.stream(
            thread["thread_id"], "messages", input=PROMPT, stream_mode=MODES, on_run_created=created.append
        )
    )
    return thread["thread_id"], created[0]["run_id"], events


async def test_a_stream_begins_with_metadata_and_ends_with_end(run):
    """Red when a client cannot tell that the run is over, and asks again."""
    _, run_id, events = run
    assert (events[0][1], json.loads(events[0][2])["run_id"]) == ("metadata", run_id)
    assert [e[1] for e in events].count("end") == 1
    assert events[-1][1] == "end"
    ids = [tuple(map(int, e[0].split("-"))) for e in events]
    assert ids == sorted(set(ids))


async def test_a_client_that_is_cut_off_anywhere_misses_nothing(client, run):
    """Red when an id is shared by two events, or the replay is not what the live stream was."""
    thread_id, run_id, events = run
    assert await events_of(client.runs.join_stream(thread_id, run_id, last_event_id="0")) == events
    for n, event in enumerate(events[:-1]):
        rest = await events_of(client.runs.join_stream(thread_id, run_id, last_event_id=event[0]))
        assert rest == events[n + 1 :], f"after {event[0]}"


@pytest.mark.parametrize("cursor", ["-1", "0", "garbage", "99-7", "1-999999"])
async def test_a_finished_run_ends_the_stream_whatever_the_cursor(client, run, cursor):
    """Red when a cursor that means nothing leaves the client with heartbeats for ever."""
    thread_id, run_id, _ = run
    events = await events_of(client.runs.join_stream(thread_id, run_id, last_event_id=cursor))
    assert events[-1][1] == "end"


async def test_a_client_may_leave_and_come_back_while_the_run_goes_on(client):
    """Red when events between the replay and the live stream are lost or come twice."""
    thread = await client.threads.create()
    run = await client.runs.create(
        thread["thread_id"],
        "slow",
        input={"seconds": 1.5, "piece_ms": 15},
        stream_mode="custom",
        stream_resumable=True,
    )
    ticks, cursor, over = [], "0", False
    while not over:
        taken = 0
        async for event in client.runs.join_stream(thread["thread_id"], run["run_id"], last_event_id=cursor):
            cursor = event.id
            if event.event == "custom":
                ticks.append(event.data["tick"])
            over = event.event == "end"
            taken += 1
            if taken == 7 and not over:
                break
    assert ticks == list(range(100))


async def test_a_response_that_breaks_is_taken_up_by_the_sdk_itself(client, stack):
    """Red when the response has no Location that works: the SDK raises instead of joining again."""
    async with httpx.AsyncClient(
        base_url=stack.info.api_url, headers={"x-api-key": stack.info.api_key}
    ) as http:
        async with http.stream(
            "POST", "/runs/stream", json={"assistant_id": "counter", "input": {"steps": 3}}
        ) as answer:
            location = answer.headers["location"]
            first = [line async for line in answer.aiter_lines()]
        replay = await http.get(location, headers={"last-event-id": "0"})
    assert "event: end" in first
    assert replay.text.splitlines() == first[first.index("event: metadata") :]


async def test_the_events_of_subgraphs_come_only_if_asked_for(client):
    """Red when stream_subgraphs is ignored either way."""

    async def names(subgraphs):
        return {
            e.event
            async for e in client.runs.stream(
                None, "parent", input={"value": 1}, stream_mode="updates", stream_subgraphs=subgraphs
            )
        }

    assert not any(name.startswith("updates|") for name in await names(False))
    assert any(name.startswith("updates|nested:") for name in await names(True))


async def test_the_first_join_without_a_cursor_shows_only_what_comes(client, run):
    """Red when a late join replays, or waits on a run that is over."""
    thread_id, run_id, _ = run
    events = await events_of(client.runs.join_stream(thread_id, run_id))
    assert [e[1] for e in events] in ([], ["end"])
