"""Whatever comes out of a sandbox, the host goes on: the sandbox is declared lost, nothing grows, nothing blocks."""

import asyncio
import json
import random
import socket
import struct
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.fleet.host import agent_link
from sandfleet.fleet.host.agent_link import AgentLink
from sandfleet.fleet.host.results import ProtocolError
from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxBusy, SandboxLost
from sandfleet.fleet.sandbox_agent import wire
from tests.waiting import eventually

HELLO = wire.pack(wire.HELLO, 0, json.dumps({"newest": wire.NEWEST, "oldest": wire.OLDEST}).encode())
SPEC = {"shell": "true", "timeout_s": 1, "output_bytes": 1000}
EXIT = {
    "exit_code": 0, "signal": None, "timed_out": False, "killed": False, "kill_rung": 0, "dropped_bytes": 0,
    "out_of_memory": False, "memory_limit_bytes": None, "memory_peak_bytes": None, "duration_ms": 1,
}  # fmt: skip


def done(**changes):
    return json.dumps({**EXIT, **changes}).encode()


@asynccontextmanager
async def linked(hello=HELLO):
    """A link and the agent's raw end of it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0sandfleet-test-{random.getrandbits(64):x}")
    listener.listen(1)
    listener.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(listener.getsockname())
    writer.write(hello)
    try:
        link = await AgentLink.accept(listener)
        serving = asyncio.create_task(serve(link))
        try:
            yield link, reader, writer
        finally:
            link.close("the test is over")
            await serving
    finally:
        listener.close()
        writer.transport.abort()


async def serve(link):
    reason = await link.serve()
    link.close(reason)
    return reason


async def drain(operation):
    while await operation.take() is not None:
        pass


async def lost(operation):
    with pytest.raises(SandboxLost) as raised:
        await drain(operation)
    return str(raised.value)


async def start_many(link, count, spec):
    for _ in range(count):
        await link.start(wire.EXEC, spec, 1000)


@given(
    st.lists(
        st.tuples(st.integers(wire.HELLO, wire.RESIZE), st.integers(0, 2**32 - 1), st.binary(max_size=300)),
        max_size=8,
    ),
    st.data(),
)
def test_frames_come_out_as_they_went_in_however_they_are_cut(frames, data):
    stream = b"".join(wire.pack(*frame) for frame in frames)
    decoder, found = wire.Decoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert found == frames


@given(st.binary(max_size=2000))
def test_noise_is_frames_or_an_error_and_never_grows(noise):
    """Red when a length is believed before it is checked."""
    decoder = wire.Decoder()
    try:
        for _ in decoder.feed(noise):
            pass
    except wire.FrameError:
        return
    assert len(decoder._buffer) <= wire.HEADER.size + wire.MAX_BODY


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        wire.pack(wire.STDOUT, 0, b"{}"),
        wire.pack(wire.HELLO, 1, b"{}"),
        wire.pack(wire.HELLO, 0, b"[]"),
        wire.pack(wire.HELLO, 0, b"{"),
        wire.pack(wire.HELLO, 0, b"[" * 5000),
        wire.pack(wire.HELLO, 0, b'{"newest": 1, "oldest": 1}'),
        wire.HEADER.pack(2**32 - 1, wire.HELLO, 0),
    ],
)
async def test_a_bad_hello_is_no_agent(hello):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0sandfleet-test-{random.getrandbits(64):x}")
    listener.listen(1)
    listener.setblocking(False)
    _, writer = await asyncio.open_unix_connection(listener.getsockname())
    writer.write(hello)
    writer.close()
    with pytest.raises(ProtocolError):
        await AgentLink.accept(listener)
    listener.close()


BROKEN = {
    "a frame that is too long": wire.HEADER.pack(wire.MAX_BODY + 1, wire.STDOUT, 1),
    "an unknown kind": wire.HEADER.pack(0, 99, 1),
    "an operation that was never begun": wire.pack(wire.STDOUT, 7, b"x"),
    "a second hello": HELLO,
    "an order to the host": wire.pack(wire.EXEC, 1, b"{}"),
    "content of another kind": wire.pack(wire.DATA, 1, b"x"),
    "empty content": wire.pack(wire.STDOUT, 1, b""),
    "more than the window": wire.pack(wire.STDOUT, 1, b"x" * wire.MAX_BODY) * 2,
    "more than the limit": wire.pack(wire.STDOUT, 1, b"x" * 1001),
    "credit that was never used": wire.pack(wire.CREDIT, 1, struct.pack("!I", 1)),
    "credit of the wrong size": wire.pack(wire.CREDIT, 1, b"x"),
    "an end that is no JSON": wire.pack(wire.DONE, 1, b"\xff"),
    "an end that is nested deeply": wire.pack(wire.DONE, 1, b"[" * 8000),
    "an end that is too long": wire.pack(wire.DONE, 1, done(x="x" * 9000)),
    "an end without its fields": wire.pack(wire.DONE, 1, b"{}"),
    "an end with another type": wire.pack(wire.DONE, 1, done(exit_code="0")),
    "an end with a truth value for a number": wire.pack(wire.DONE, 1, done(exit_code=True)),
    "an end with a negative number": wire.pack(wire.DONE, 1, done(dropped_bytes=-1)),
    "an end with a number that is none": wire.pack(wire.DONE, 1, done(duration_ms=float("nan"))),
    "an end with a huge number": wire.pack(wire.DONE, 1, done(duration_ms=10**400)),
    "a failure without a message": wire.pack(wire.FAIL, 1, b'{"code": "x"}'),
    "a failure with a strange code": wire.pack(wire.FAIL, 1, b'{"code": "\\ud800", "message": ""}'),
    "two ends": wire.pack(wire.DONE, 1, done()) * 2 + wire.pack(wire.STDOUT, 2, b"x" * 1001),
    "the end of the connection": None,
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_rule_ends_the_sandbox_and_everything_under_way(sent):
    """Red for each rule that the host does not check itself."""
    async with linked() as (link, _, writer):
        first = await link.start(wire.EXEC, SPEC, 1000)
        second = await link.start(wire.EXEC, SPEC, 1000)
        if sent is None:
            writer.close()
        else:
            writer.write(sent)
        async with asyncio.timeout(60):
            with suppress(SandboxLost):
                await drain(first)
            await lost(second)
            with pytest.raises(SandboxLost):
                await link.start(wire.EXEC, SPEC, 1000)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(
                wire.pack,
                st.sampled_from([wire.STDOUT, wire.STDERR, wire.CREDIT, wire.DONE, wire.FAIL]),
                st.integers(0, 3),
                st.one_of(st.binary(max_size=50), st.just(done()), st.just(struct.pack("!I", 5))),
            ),
        ),
        max_size=12,
    )
)
def test_no_sequence_of_bytes_raises_anything_else_or_hangs(parts):
    """Red when any input leaves an operation waiting after the connection ended, or raises what no one expects."""

    async def play():
        async with linked() as (link, _, writer):
            operations = [await link.start(wire.EXEC, SPEC, 1000) for _ in range(2)]
            for part in parts:
                writer.write(part)
            writer.close()
            for operation in operations:
                with suppress(SandboxLost, OperationRefused):
                    await drain(operation)

    async def bounded():
        async with asyncio.timeout(60):
            await play()

    asyncio.run(bounded())


async def test_content_nobody_takes_waits_in_the_sandbox():
    """Red without the window: the host's memory would hold what a slow caller does not take."""
    async with linked() as (link, _, writer):
        operation = await link.start(wire.EXEC, SPEC, 10**9)
        writer.write(wire.pack(wire.STDOUT, 1, b"x" * wire.CHUNK) * (wire.WINDOW // wire.CHUNK))
        await eventually(lambda: sum(len(b) for _, b in operation._queue) == wire.WINDOW)
        writer.write(wire.pack(wire.STDOUT, 1, b"x"))
        async with asyncio.timeout(60):
            await operation.ended.wait()
        assert "protocol" in await lost(operation)


async def test_a_slow_caller_does_not_hold_up_the_others():
    """Red when one queue serves all operations of a sandbox."""
    async with linked() as (link, _, writer):
        await link.start(wire.EXEC, SPEC, 10**9)
        quick = await link.start(wire.EXEC, SPEC, 1000)
        writer.write(wire.pack(wire.STDOUT, 1, b"x" * wire.CHUNK) * (wire.WINDOW // wire.CHUNK))
        writer.write(wire.pack(wire.STDOUT, 2, b"quick") + wire.pack(wire.DONE, 2, done()))
        async with asyncio.timeout(60):
            assert await quick.take() == (wire.STDOUT, b"quick")
            assert await quick.take() is None


async def test_an_agent_that_does_not_read_is_broken(monkeypatch):
    """Red when frames to it pile up in the host's memory, or a sender waits for ever."""
    monkeypatch.setattr("sandfleet.fleet.host.agent_link._SEND_TIMEOUT_S", 0.5)
    async with linked() as (link, reader, _):
        reader._transport.pause_reading()
        operation = await link.start(wire.WRITE, {"path": "x"}, 0)
        async with asyncio.timeout(60):
            with pytest.raises(SandboxLost, match="stopped reading"):
                await start_many(link, 40, {"shell": "x" * 100_000})
        assert operation.ended.is_set()


async def test_a_flood_of_tiny_frames_leaves_time_for_everybody_else():
    """Red without the pace: the loop would be busy with one sandbox until the flood is over."""
    frames = 4 * agent_link._PACE_FRAMES
    async with linked() as (link, _, writer):
        operation = await link.start(wire.EXEC, SPEC, 10**9)
        operation.discard()
        start, seen, at_once = asyncio.get_running_loop().time(), 0, 0
        writer.write(wire.pack(wire.STDOUT, 1, b"x") * frames)
        async with asyncio.timeout(60):
            while seen < frames:
                await asyncio.sleep(0)
                at_once = max(at_once, operation.discarded_bytes - seen)
                seen = operation.discarded_bytes
        assert at_once <= agent_link._PACE_FRAMES
        # The least that it may take: a slow machine takes longer.
        assert asyncio.get_running_loop().time() - start >= 3 * agent_link._PACE_S * 0.99


async def test_an_agent_cannot_have_the_host_remember_without_end():
    """Red when operations that nobody answers can be begun without limit."""
    async with linked() as (link, _, _writer):
        with pytest.raises(SandboxBusy):
            await start_many(link, 1000, SPEC)


async def test_a_request_longer_than_a_frame_is_refused():
    async with linked() as (link, _, _writer):
        with pytest.raises(OperationRefused, match="longer"):
            await link.start(wire.EXEC, {**SPEC, "shell": "x" * wire.MAX_BODY}, 1000)


async def test_a_message_of_the_agent_is_storable_text():
    async with linked() as (link, _, writer):
        operation = await link.start(wire.EXEC, SPEC, 1000)
        writer.write(wire.pack(wire.FAIL, 1, b'{"code": "x", "message": "a\\ud800b"}'))
        with pytest.raises(OperationRefused) as refused:
            await operation.take()
        assert str(refused.value) == "a?b"
