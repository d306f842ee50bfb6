"""Whatever comes out of a sandbox, the host goes on: the sandbox is declared lost, nothing grows, nothing blocks."""

import asyncio
import json
import struct
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.fleet.host import agent_link
from sandfleet.fleet.host.results import ProtocolError
from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxBusy, SandboxLost
from sandfleet.fleet.sandbox_agent import wire
from tests.sandbox.hostile import (
    ANY,
    HELLO,
    SECRET,
    SPEC,
    accepted,
    done,
    drain,
    failed,
    linked,
    listening,
    lost,
    start,
    start_many,
)
from tests.waiting import eventually


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


def greeting(**said):
    return wire.pack(wire.HELLO, 0, json.dumps({"newest": 3, "oldest": 3, **said}).encode())


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
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
        wire.pack(wire.HELLO, 0, b'{"oldest": 3, "newest": 1' + b"0" * 5000 + b"}"),
    ],
)
async def test_a_bad_hello_is_no_agent(hello, again):
    await refused_hello(hello, again=again)


@pytest.mark.parametrize(
    "secret", ["\ud800", "x\udcffy", "ä" * 32, "", "x" * 8000, SECRET[:-1], None, 7, [SECRET]]
)
async def test_who_does_not_know_the_secret_is_no_agent_of_an_earlier_host(secret):
    """Red when a secret is compared before it is known to be one: half a surrogate pair cannot be encoded, and what that
    raised kept the host from starting."""
    await refused_hello(greeting(secret=secret), again=True)


async def test_who_knows_the_secret_is_the_agent_of_an_earlier_host():
    async with linked(greeting(secret=SECRET), again=True) as (link, _, _writer):
        assert link.alive


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(ANY)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.dictionaries(st.sampled_from(["newest", "oldest", "secret", "uid"]), inner, max_size=4),
            ),
        ).map(lambda said: json.dumps(said).encode()),
        st.text(ANY).map(lambda secret: json.dumps({"newest": 3, "oldest": 3, "secret": secret}).encode()),
    )
)
def test_no_hello_of_one_who_comes_again_raises_anything_else(body):
    """Red when any hello raises what adoption does not expect: one command would decide whether its host starts."""
    asyncio.run(refused_hello(wire.pack(wire.HELLO, 0, body), again=True))


async def refused_hello(hello, *, again):
    listener = listening()
    _, writer = await asyncio.open_unix_connection(listener.getsockname())
    try:
        writer.write(hello)
        writer.close()
        with pytest.raises(ProtocolError):
            await accepted(listener, again=again)
    finally:
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
    "a failure that only the host may speak of": wire.pack(wire.FAIL, 1, failed("superseded")),
    "a failure of no kind": wire.pack(wire.FAIL, 1, failed("x")),
    "a rung that no ladder has": wire.pack(wire.DONE, 1, done(kill_rung=3)),
    "two ends": wire.pack(wire.DONE, 1, done()) * 2 + wire.pack(wire.STDOUT, 2, b"x" * 1001),
    "the end of the connection": None,
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_rule_ends_the_sandbox_and_everything_under_way(sent):
    """Red for each rule that the host does not check itself."""
    async with linked() as (link, _, writer):
        first = await start(link, wire.EXEC, SPEC, 1000)
        second = await start(link, wire.EXEC, SPEC, 1000)
        if sent is None:
            writer.close()
        else:
            writer.write(sent)
        async with asyncio.timeout(60):
            with suppress(SandboxLost):
                await drain(first)
            await lost(second)
            with pytest.raises(SandboxLost):
                await start(link, wire.EXEC, SPEC, 1000)


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
            operations = [await start(link, wire.EXEC, SPEC, 1000) for _ in range(2)]
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
        operation = await start(link, wire.EXEC, SPEC, 10**9)
        writer.write(wire.pack(wire.STDOUT, 1, b"x" * wire.CHUNK) * (wire.WINDOW // wire.CHUNK))
        await eventually(lambda: sum(len(b) for _, b in operation._queue) == wire.WINDOW)
        writer.write(wire.pack(wire.STDOUT, 1, b"x"))
        async with asyncio.timeout(60):
            await operation.ended.wait()
        assert "protocol" in await lost(operation)


async def test_a_slow_caller_does_not_hold_up_the_others():
    """Red when one queue serves all operations of a sandbox."""
    async with linked() as (link, _, writer):
        await start(link, wire.EXEC, SPEC, 10**9)
        quick = await start(link, wire.EXEC, SPEC, 1000)
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
        operation = await start(link, wire.WRITE, {"path": "x"}, 0)
        async with asyncio.timeout(60):
            with pytest.raises(SandboxLost, match="stopped reading"):
                await start_many(link, 40, {"shell": "x" * 100_000})
        assert operation.ended.is_set()


async def test_a_flood_of_tiny_frames_leaves_time_for_everybody_else():
    """Red without the pace: the loop would be busy with one sandbox until the flood is over."""
    frames = 4 * agent_link._PACE_FRAMES
    async with linked() as (link, _, writer):
        operation = await start(link, wire.EXEC, SPEC, 10**9)
        operation.discard()
        began, seen, at_once = asyncio.get_running_loop().time(), 0, 0
        writer.write(wire.pack(wire.STDOUT, 1, b"x") * frames)
        async with asyncio.timeout(60):
            while seen < frames:
                await asyncio.sleep(0)
                at_once = max(at_once, operation.discarded_bytes - seen)
                seen = operation.discarded_bytes
        assert at_once <= agent_link._PACE_FRAMES
        # The least that it may take: a slow machine takes longer.
        assert asyncio.get_running_loop().time() - began >= 3 * agent_link._PACE_S * 0.99


async def test_an_agent_cannot_have_the_host_remember_without_end():
    """Red when operations that nobody answers can be begun without limit."""
    async with linked() as (link, _, _writer):
        with pytest.raises(SandboxBusy):
            await start_many(link, 1000, SPEC)


async def test_a_request_longer_than_a_frame_is_refused():
    async with linked() as (link, _, _writer):
        with pytest.raises(OperationRefused, match="longer"):
            await start(link, wire.EXEC, {**SPEC, "shell": "x" * wire.MAX_BODY}, 1000)


async def test_a_message_of_the_agent_is_storable_text():
    async with linked() as (link, _, writer):
        operation = await start(link, wire.EXEC, SPEC, 1000)
        writer.write(wire.pack(wire.FAIL, 1, b'{"code": "io_error", "message": "a\\ud800b"}'))
        with pytest.raises(OperationRefused) as refused:
            await operation.take()
        assert str(refused.value) == "a?b"


async def test_what_nobody_thought_of_costs_the_sandbox_and_not_the_host(monkeypatch):
    """Red when an error that nobody expects ends the task that serves a sandbox: its callers would wait for ever."""
    monkeypatch.setattr("sandfleet.fleet.host.results.failure", lambda body: 1 / 0)
    async with linked() as (link, _, writer):
        operation = await start(link, wire.EXEC, SPEC, 1000)
        writer.write(wire.pack(wire.FAIL, 1, b"{}"))
        async with asyncio.timeout(60):
            assert "broke the protocol" in await lost(operation)
