"""Whatever a host sends, the agent answers, refuses, or ends: it neither hangs nor fails.

The agent runs in a sandbox of its own, as PID 1 there: nothing else may be killed by it.
"""

import asyncio
import json
import os
import socket
import uuid
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.backend import AGENT_NAME, Launch
from sandfleet.fleet.host.bwrap_backend import BwrapBackend
from sandfleet.fleet.sandbox_agent import wire
from sandfleet.shared.ids import RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import DEFAULT, read_templates

TEMPLATES = read_templates(Settings())
KEY = RunKey("acme", "ada", uuid.uuid4())
HELLO = wire.pack(wire.HELLO, 0, json.dumps({"protocol": wire.NEWEST}).encode())
RULE_BROKEN = 3  # the agent's exit status


@asynccontextmanager
async def agent(folder: Path):
    """A fresh agent: its connection, and its process."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    folder.parent.chmod(0o755)
    backend = BwrapBackend(TEMPLATES)
    AgentFiles(folder.parent / "agent").place(folder / AGENT_NAME)
    listener = socket.socket(socket.AF_UNIX)
    directory = os.open(folder, os.O_PATH)
    listener.bind(f"/proc/self/fd/{directory}/agent.sock")
    os.close(directory)
    (folder / "agent.sock").chmod(0o666)
    listener.listen(1)
    listener.setblocking(False)
    handle = await backend.create(Launch("one", KEY, folder, TEMPLATES.templates[DEFAULT]))
    try:
        async with asyncio.timeout(30):
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        yield reader, writer, backend._processes[handle].bwrap
        writer.transport.abort()
    finally:
        listener.close()
        await backend.destroy(handle)


async def frames(reader, decoder):
    """Frames as they come."""
    while data := await reader.read(wire.CHUNK):
        for frame in decoder.feed(data):
            yield frame


async def answers(reader, decoder, op):
    """Read until the operation's end, and return that."""
    async for kind, number, body in frames(reader, decoder):
        if number == op and kind in (wire.DONE, wire.FAIL):
            return kind, json.loads(body)
    return None


BROKEN = {
    "no hello": wire.pack(wire.EXEC, 1, b"{}"),
    "a hello of another version": wire.pack(wire.HELLO, 0, b'{"protocol": 99}'),
    "a hello that is no object": wire.pack(wire.HELLO, 0, b"[]"),
    "a hello that is nested deeply": wire.pack(wire.HELLO, 0, b"[" * 100_000),
    "two hellos": HELLO * 2,
    "a frame that is too long": HELLO + wire.HEADER.pack(wire.MAX_BODY + 1, wire.EXEC, 1),
    "an unknown kind": HELLO + wire.HEADER.pack(0, 99, 1),
    "a kind that only agents send": HELLO + wire.pack(wire.DONE, 1, b"{}"),
    "an operation that begins twice": HELLO
    + wire.pack(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": 9, "output_bytes": 9}') * 2,
    "content beyond the window": HELLO
    + wire.pack(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": 9, "output_bytes": 9, "stdin": true}')
    + wire.pack(wire.DATA, 1, bytes(wire.CHUNK)) * 7,
    "credit that was never used": HELLO
    + wire.pack(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": 9, "output_bytes": 9}')
    + wire.pack(wire.CREDIT, 1, b"\0\0\0\1"),
    "credit of the wrong size": HELLO
    + wire.pack(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": 9, "output_bytes": 9}')
    + wire.pack(wire.CREDIT, 1, b"\0"),
    "a size that is none": HELLO
    + wire.pack(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": 9, "output_bytes": 9}')
    + wire.pack(wire.RESIZE, 1, b"\0"),
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_rule_ends_the_agent_with_a_status_of_its_own(tmp_path, sent):
    """Red for each rule that the agent does not check: it would go on, or fail with a traceback (status 1)."""
    async with agent(tmp_path / "one") as (reader, writer, process):
        writer.write(sent)
        async with asyncio.timeout(30):
            with suppress(ConnectionResetError):  # it left what it had not read yet
                while await reader.read(wire.CHUNK):
                    pass
            assert await process.wait() == RULE_BROKEN


async def test_a_host_that_hangs_up_ends_the_agent_and_all_else(tmp_path):
    async with agent(tmp_path / "one") as (_, writer, process):
        spec = b'{"shell": "trap : TERM; setsid sleep 300 & sleep 301", "timeout_s": 900, "output_bytes": 9}'
        writer.write(HELLO + wire.pack(wire.EXEC, 1, spec))
        await writer.drain()
        writer.close()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_findings_wait_for_credit(tmp_path):
    """Red when a search sends what it has without credit: the host would end the sandbox for it."""
    async with agent(tmp_path / "one") as (reader, writer, _):
        decoder = wire.Decoder()
        spec = {"shell": "seq -f 'line %060.0f' 9000 > f", "timeout_s": 60, "output_bytes": 9}
        writer.write(HELLO + wire.pack(wire.EXEC, 1, json.dumps(spec).encode()))
        search = {"do": "grep", "path": "f", "pattern": "line", "most": 9000, "timeout_s": 90}
        sent, ticks = 0, 0
        async with asyncio.timeout(60):
            async for kind, op, body in frames(reader, decoder):
                if (kind, op) == (wire.DONE, 1):
                    writer.write(wire.pack(wire.FILES, 2, json.dumps(search).encode()))
                elif op == 2:
                    assert kind == wire.DATA
                    sent += len(body)
                    assert sent <= wire.WINDOW
                    if sent == wire.WINDOW:  # then some time passes in which more could come
                        spec = {"shell": "sleep 0.5", "timeout_s": 60, "output_bytes": 9}
                        writer.write(wire.pack(wire.EXEC, 3, json.dumps(spec).encode()))
                elif (kind, op) == (wire.DONE, 3):
                    ticks += 1
                    break
        assert (sent, ticks) == (wire.WINDOW, 1)


async def test_a_host_that_asks_without_end_and_never_reads_is_left(tmp_path):
    """Red without the bound: refusals that nobody reads would fill the memory of PID 1."""
    async with agent(tmp_path / "one") as (reader, writer, process):
        reader._transport.pause_reading()
        writer.write(HELLO)
        flood = wire.pack(wire.READ, 1, json.dumps({"path": "x" * 900}).encode()) * 100
        ended = asyncio.create_task(process.wait())
        async with asyncio.timeout(120):
            while not ended.done():
                writer.write(flood)
                try:
                    await writer.drain()
                except OSError:
                    break
            assert await ended == RULE_BROKEN


numbers = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, 5, 0.01, -1, 1e308, True, None])
)
scalars = st.one_of(
    numbers, st.text(max_size=8), st.sampled_from(["/workspace", "/tmp/x", ".", "a\0b", "\ud800", "**", "("])
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(["rows", "columns", "x"]), scalars, max_size=3),
)
DO = [
    "stat", "mkdir", "list", "glob", "grep", "move", "copy", "remove", "start", "read", "write", "signal", "wait",
    "kill", "resize",
]  # fmt: skip
FIELDS = [
    "path", "to", "pattern", "glob", "most", "fixed", "replace", "recursive", "mode", "append", "offset", "limit",
    "timeout_s", "argv", "cwd", "env", "stdin", "pty", "output_bytes", "process", "signal", "wait_s", "close", "forget", "rows",
    "columns",
]  # fmt: skip
specs = st.builds(
    lambda fields, sane, do: {**sane, **fields, "do": do},
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=6),
    st.sampled_from(
        [
            {},
            {"path": "f", "to": "g", "pattern": "*", "most": 5, "timeout_s": 1, "offset": 0, "limit": 9},
            {
                "shell": "echo x; cat",
                "timeout_s": 1,
                "output_bytes": 100,
                "stdin": True,
                "process": 1,
                "wait_s": 0.1,
            },
            {
                "argv": ["cat"],
                "timeout_s": 1,
                "output_bytes": 100,
                "pty": {"rows": 5, "columns": 5},
                "signal": 15,
            },
        ]
    ),
    st.one_of(st.sampled_from(DO), values),
)
requests = st.one_of(
    st.builds(
        lambda kind, op, spec: (kind, op, json.dumps(spec).encode()),
        st.sampled_from([wire.EXEC, wire.READ, wire.WRITE, wire.FILES, wire.PROCESS]), st.integers(1, 50), specs,
    ),
    st.tuples(st.sampled_from([wire.EXEC, wire.FILES, wire.PROCESS]), st.integers(1, 50), st.binary(max_size=60)),
    st.tuples(st.just(wire.DATA), st.integers(1, 50), st.binary(max_size=60)),
    st.tuples(st.sampled_from([wire.EOF, wire.KILL]), st.integers(1, 50), st.just(b"")),
    st.tuples(st.just(wire.RESIZE), st.integers(1, 50), st.binary(min_size=4, max_size=4)),
)  # fmt: skip


@settings(
    deadline=None, max_examples=40, suppress_health_check=list(HealthCheck), print_blob=True,
)  # fmt: skip
@given(st.lists(requests, max_size=40))
@example([(wire.EXEC, 1, b'{"shell": "sleep 9", "timeout_s": NaN, "output_bytes": 9}')])
@example([(wire.FILES, 1, b'{"do": "grep", "path": ".", "pattern": "x", "most": 1, "timeout_s": -Infinity}')])
@example([(wire.PROCESS, 1, b"S\x00\xa8\xf6\x8dV\x1f")])  # UTF-16 by its looks
@example([(wire.EXEC, 1, b'{"shell": "cat", "timeout_s": 9, "output_bytes": 9, "pty": {"rows": -1}}')])
def test_no_sequence_of_requests_makes_it_fail_or_hang(tmp_path_factory, sent):
    """Red when a field of a wrong type, a missing one, NaN for a time, or any order of frames raises in the agent.

    Operations that begin twice are left out: they end it, as shown above.
    """
    begun = set()
    parts = []
    for kind, op, body in sent:
        starts = kind in (wire.EXEC, wire.READ, wire.WRITE, wire.FILES, wire.PROCESS)
        if starts and op in begun:
            continue
        begun |= {op} if starts else set()
        parts.append(wire.pack(kind, op, body))

    async def play():
        async with agent(tmp_path_factory.mktemp("hostile") / "one") as (reader, writer, process):
            decoder = wire.Decoder()
            writer.write(HELLO + b"".join(parts))
            last = wire.pack(wire.EXEC, 99, b'{"shell": "echo fine", "timeout_s": 60, "output_bytes": 9}')
            writer.write(last)
            async with asyncio.timeout(60):
                ended = await answers(reader, decoder, 99)
            assert ended is not None, f"the agent ended with {await process.wait()}"
            kind, result = ended
            assert kind == wire.DONE or result["code"] in ("busy", "cannot_start")

    asyncio.run(play())
