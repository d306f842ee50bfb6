"""Answers of an agent that is not what it says: listings, contents, results."""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandfleet.fleet.host import agent_link, workspace
from sandfleet.fleet.host.answers import Answers
from sandfleet.fleet.host.results import _LINES, CODES, Lines, ProtocolError
from sandfleet.fleet.sandbox.errors import OperationRefused, SandboxLost
from sandfleet.fleet.sandbox_agent import wire
from tests.sandbox.hostile import (
    ANY,
    SPEC,
    done,
    drain,
    linked,
    start,
)
from tests.waiting import eventually


def entry(**changes):
    return {"name": "a", "kind": "file", "size": 1, "mode": 420, "modified_s": 1, **changes}


def lines(*entries):
    return b"".join(json.dumps(one).encode() + b"\n" for one in entries)


LIST = {"do": "list", "path": "."}


async def list_through(link, answers):
    async with answers.slot():
        return await answers.read(await start(link, wire.FILES, LIST, wire.MAX_LINES_BYTES))


@pytest.mark.parametrize(
    "content",
    [
        b'{"x": [' + b"{}," * 15_000 + b"{}]}",
        b'{"x": [' + b"{}," * 15_000 + b"{}]}\n",
        lines(entry(name="x" * 33_000)),
        lines(entry(size=-1)),
        b"[]\n",
        b"\n",
        b"[" * 20_000 + b"\n",
    ],
    ids=["no end", "long and wide", "long", "negative", "a list", "empty", "deep"],
)
async def test_a_line_that_is_none_breaks_the_protocol(content):
    """Red without the limit of a line: the host's loop would parse megabytes of it in one piece."""
    async with linked() as (link, _, writer):
        listing = asyncio.create_task(list_through(link, Answers()))
        for at in range(0, len(content), wire.CHUNK):
            writer.write(wire.pack(wire.DATA, 1, content[at : at + wire.CHUNK]))
        async with asyncio.timeout(60):
            with pytest.raises(ProtocolError):
                await listing


def test_more_lines_than_there_may_be_break_the_protocol():
    found = Lines((wire.FILES, "list"))
    found.feed(lines(*[entry()] * wire.MAX_ENTRIES))
    with pytest.raises(ProtocolError):
        found.feed(lines(entry()))


async def test_the_longest_name_and_text_that_there_can_be_fit_in_a_line():
    """Red when the limit is lower than what an honest agent says of a path of control characters."""
    found = Lines((wire.FILES, "grep"))
    found.feed(lines({"name": "\1" * 4096, "line": 2**40, "text": "\1" * 500}))
    assert len(found.found) == 1


async def test_a_long_answer_lets_everybody_else_go_on_while_it_is_read(monkeypatch):
    """Red when more than one piece is read in one turn of the loop, be it for one question or for several at once."""
    turns, fed = 0, {}
    feed = Lines.feed

    def watched(self, content):
        fed[turns] = fed.get(turns, 0) + len(content)
        feed(self, content)

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Lines, "feed", watched)
    answer = lines(*[entry(name="x" * 100)] * 500)
    async with linked() as (link, _, writer):
        answers = Answers()
        other = asyncio.create_task(others())
        listings = [asyncio.create_task(list_through(link, answers)) for _ in range(3)]
        await asyncio.sleep(0)
        for op in (1, 2, 3):
            writer.write(wire.pack(wire.DATA, op, answer))
            writer.write(wire.pack(wire.DONE, op, b'{"truncated": false, "timed_out": false}'))
        async with asyncio.timeout(60):
            found = await asyncio.gather(*listings)
        other.cancel()
    assert [len(each) for each in found] == [500] * 3
    assert sum(fed.values()) == 3 * len(answer)
    assert max(fed.values()) <= 16 * 1024


async def test_only_so_many_answers_are_held_at_once():
    """Red without the bound: each may be megabytes, and a sandbox may be asked for 32."""
    async with linked() as (link, _, writer):
        answers = Answers()
        listings = [asyncio.create_task(list_through(link, answers)) for _ in range(6)]
        await eventually(lambda: len(link._operations) == 4, what="four are asked")
        for op in range(1, 7):
            await eventually(lambda op=op: op in link._operations, what="the next is asked")
            assert len(link._operations) <= 4
            writer.write(wire.pack(wire.DONE, op, b'{"truncated": false, "timed_out": false}'))
        async with asyncio.timeout(60):
            assert await asyncio.gather(*listings) == [[]] * 6


@pytest.mark.parametrize(
    "kinds", [[wire.STDOUT], [wire.STDOUT, wire.STDERR]], ids=["one stream", "two in turn"]
)
async def test_content_in_tiny_pieces_takes_no_more_memory_than_in_large_ones(monkeypatch, kinds):
    """Red when the pieces that wait are not joined: the window bounds bytes, and an object for each takes a hundred times
    as many."""
    monkeypatch.setattr(agent_link, "_PACE_S", 0.0)
    pieces = 20_000
    async with linked() as (link, _, writer):
        operation = await start(link, wire.EXEC, SPEC, 10**9)
        sent = [(kinds[n % len(kinds)], bytes([n % 251])) for n in range(pieces)]
        writer.write(
            b"".join(wire.pack(kind, 1, body) for kind, body in sent) + wire.pack(wire.DONE, 1, done())
        )
        async with asyncio.timeout(60):
            await operation.ended.wait()
        assert len(operation._queue) <= agent_link._MANY_PIECES + 2
        taken = []
        while (item := await operation.take()) is not None:
            taken.append(item)
        for kind in kinds:
            assert b"".join(b for k, b in taken if k == kind) == b"".join(b for k, b in sent if k == kind)


WORK = [
    (wire.READ, {"path": "x"}),
    (wire.WRITE, {"path": "x"}),
    *((wire.FILES, {"do": do}) for do in ("stat", "list", "glob", "grep", "mkdir", "move", "copy", "remove")),
    *(
        (wire.PROCESS, {"do": do, "process": 1})
        for do in ("start", "list", "read", "write", "signal", "wait", "kill", "resize")
    ),
]


FIELDS = [
    "kind", "size", "mode", "modified_s", "truncated", "timed_out", "process", "pid", "running", "exit_code", "signal",
    "next_offset", "count", "offset", "lost_bytes", "name", "line", "text", "command", "age_s", "terminal", "stdin", "code",
    "message",
]  # fmt: skip


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10), st.integers(-(2**80), 2**80), st.floats(), st.text(ANY, max_size=8),
    st.sampled_from(["file", "not_found", "no_room", "superseded"]),
)  # fmt: skip


SOUND = {
    "kind": "file", "size": 1, "mode": 1, "modified_s": 1, "truncated": False, "timed_out": False, "process": 1, "pid": 9,
    "running": True, "exit_code": None, "signal": None, "next_offset": 0, "count": 1, "offset": 0, "lost_bytes": 0,
    "name": "a", "line": 1, "text": "", "command": "x", "age_s": 1, "terminal": False, "stdin": False, "code": "not_found",
    "message": "",
}  # fmt: skip


said = st.one_of(
    st.dictionaries(
        st.sampled_from(FIELDS), st.one_of(scalars, st.lists(scalars, max_size=2)), max_size=3
    ).map(lambda changes: json.dumps({**SOUND, **changes}).encode()),
    st.binary(max_size=20),
)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
@given(
    st.sampled_from(WORK),
    st.lists(
        st.one_of(
            said.map(lambda body: (wire.DATA, body + b"\n")),
            said.map(lambda body: (wire.DONE, body)),
            said.map(lambda body: (wire.FAIL, body)),
            st.tuples(
                st.sampled_from([wire.STDOUT, wire.DATA, wire.CREDIT, wire.EOF]), st.binary(max_size=8)
            ),
        ),
        max_size=4,
    ),
)
def test_no_answer_to_any_question_raises_anything_else_or_hangs(work, frames):
    """Red when a field of a result or of a line is believed: its type, its range, or that it is text at all."""
    kind, spec = work

    async def play():
        async with linked() as (link, _, writer):
            operation = await start(link, kind, spec, 10**6)
            for frame, body in frames:
                writer.write(wire.pack(frame, 1, body))
            writer.close()
            with suppress(SandboxLost, OperationRefused, ProtocolError):
                if operation.asked in _LINES:
                    json.dumps(await Answers().read(operation)).encode()
                else:
                    await drain(operation)
                json.dumps(operation.result, ensure_ascii=False, allow_nan=False).encode()

    async def bounded():
        async with asyncio.timeout(60):
            await play()

    asyncio.run(bounded())


@given(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from(
            [
                b"[" * 8000,
                b'{"files": 1e999, "bytes": 1, "skipped": 1}',
                b'{"files": -1, "bytes": 1, "skipped": 1}',
            ]
        ),
        st.dictionaries(st.sampled_from(["files", "bytes", "skipped", "missing"]), scalars, min_size=3).map(
            lambda counts: json.dumps(counts).encode()
        ),
    )
)
def test_what_the_program_that_packs_says_is_a_count_or_nothing(told):
    """Red when a number that is none, a negative or an endless one is let through, or deep nesting raises: the host would
    fail over it when it stops, with everybody's workspaces unsaved."""
    packed = workspace._counts(told)
    assert packed is None or all(0 <= count < 2**63 for count in astuple(packed))


def test_all_codes_of_the_agent_are_known():
    """Red when the agent gets a code that the host takes for a lie, and ends an honest sandbox for it."""
    source = "".join(path.read_text() for path in Path(wire.__file__).parent.glob("*.py"))
    given_codes = re.findall(
        r'(?:Refused|refuse|failure =)\(\s*"(\w+)"|"code": "(\w+)"|Error": "(\w+)"|, "(io_error)"', source
    )
    assert {code for codes in given_codes for code in codes if code} == CODES
