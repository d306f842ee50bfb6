"""The bytes of a stream of server-sent events."""

import asyncio
import json
from contextlib import aclosing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from langgraph_sdk.sse import BytesLineDecoder, SSEDecoder

from sandfleet.shared.streams.follow import StreamEvent
from sandfleet.shared.streams.sse import HEARTBEAT, body, frame


def test_a_frame_is_what_the_reference_sends() -> None:
    """CRLF, and the fields in the order event, data, id."""
    assert (
        frame(StreamEvent("3-17", "values", '{"a":1}'))
        == b'event: values\r\ndata: {"a":1}\r\nid: 3-17\r\n\r\n'
    )


def test_an_event_without_id_has_no_id_line() -> None:
    """An empty id would make the client forget its place."""
    assert frame(StreamEvent(None, "resync", "{}")) == b"event: resync\r\ndata: {}\r\n\r\n"


@example("a\nb\rc\r\nd", [], None)
@given(st.text(), st.recursive(st.text() | st.integers(-9, 9), st.lists), st.sampled_from([None, 1]))
def test_any_event_reaches_the_sdk_as_it_was(name: str, data: object, indent: int | None) -> None:
    """Line breaks in names become blanks; JSON that is spread over lines arrives as the same JSON."""
    sent = StreamEvent("1-1", "updates|" + name, json.dumps(data, ensure_ascii=False, indent=indent))
    lines, decoder = BytesLineDecoder(), SSEDecoder()
    raw = frame(sent)
    decoded = [
        part for line in lines.decode(raw) + lines.flush() if (part := decoder.decode(line.rstrip(b"\r\n")))
    ]
    assert [(p.id, p.data) for p in decoded] == [("1-1", data)]
    assert decoded[0].event == sent.event.replace("\r", " ").replace("\n", " ")


async def test_events_at_hand_leave_in_one_piece() -> None:
    """A piece costs a system call and the server's overhead. Broken by yielding per event."""

    async def events():
        for n in range(100):
            yield StreamEvent(f"1-{n}", "messages", "1")

    pieces = [piece async for piece in body(events(), 60)]
    assert len(pieces) == 1
    assert pieces[0].count(b"\r\n\r\n") == 100


async def test_an_event_does_not_wait_for_the_next() -> None:
    more = asyncio.Event()

    async def events():
        yield StreamEvent("1-0", "metadata", "1")
        await more.wait()
        yield StreamEvent("1-1", "end", "null")

    async with aclosing(body(events(), 60)) as pieces:
        assert await anext(pieces) == frame(StreamEvent("1-0", "metadata", "1"))
        more.set()
        assert [piece async for piece in pieces] == [frame(StreamEvent("1-1", "end", "null"))]


async def test_silence_is_broken_by_heartbeats_between_whole_frames() -> None:
    """Broken by a timer that cancels the wait for the next event: the stream would end with the first heartbeat."""
    more = asyncio.Event()

    async def events():
        yield StreamEvent("1-0", "metadata", "1")
        await more.wait()
        yield StreamEvent("1-1", "end", "null")

    pieces = []
    async for piece in body(events(), 0.01):
        pieces.append(piece)
        if pieces.count(HEARTBEAT) == 3:
            more.set()
    assert [piece for piece in pieces if piece != HEARTBEAT] == [
        frame(StreamEvent("1-0", "metadata", "1")),
        frame(StreamEvent("1-1", "end", "null")),
    ]
    assert pieces.count(HEARTBEAT) >= 3


async def test_a_client_that_does_not_read_holds_up_the_stream_and_not_the_memory() -> None:
    """Broken by gathering without a bound."""
    made = 0

    async def events():
        nonlocal made
        for made in range(1, 1001):
            yield StreamEvent("1-1", "messages", "x" * 10_000)

    async with aclosing(body(events(), 60)) as pieces:
        size = len(await anext(pieces))
        assert size < 600_000
        assert made < 100
        size += sum([len(piece) async for piece in pieces])
        assert made == 1000
        assert size > 10_000_000


@pytest.mark.parametrize("data", ["1", "x" * 1_000_000], ids=["waiting for events", "waiting for the client"])
async def test_closing_the_body_closes_the_events(data: str) -> None:
    """The client has gone. Broken by leaving the source to the garbage collector: its run stays watched."""
    closed = False

    async def events():
        nonlocal closed
        try:
            yield StreamEvent("1-0", "metadata", data)
            await asyncio.Event().wait()
        finally:
            closed = True

    async with aclosing(body(events(), 60)) as pieces:
        await anext(pieces)
    assert closed


async def test_an_error_of_the_source_reaches_the_server() -> None:
    """What was made before it is sent first; the response then breaks instead of ending as if all was well."""

    async def events():
        yield StreamEvent("1-0", "metadata", "1")
        raise RuntimeError("broken")

    pieces = body(events(), 60)
    assert await anext(pieces) == frame(StreamEvent("1-0", "metadata", "1"))
    with pytest.raises(RuntimeError, match="broken"):
        await anext(pieces)
