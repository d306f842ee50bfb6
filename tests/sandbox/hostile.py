"""An agent that does as a test says, on the other end of a host's link."""

import asyncio
import json
import random
import socket
from contextlib import asynccontextmanager

import pytest
from hypothesis import strategies as st

from sandfleet.fleet.host.agent_link import AgentLink
from sandfleet.fleet.sandbox.errors import SandboxLost
from sandfleet.fleet.sandbox_agent import wire

HELLO = wire.pack(wire.HELLO, 0, json.dumps({"newest": wire.NEWEST, "oldest": wire.OLDEST}).encode())


ANY = st.one_of(
    st.characters(), st.characters(categories=["Cs"])
)  # half surrogate pairs too, which are no text


SECRET = "5" * 32


SPEC = {"shell": "true", "timeout_s": 1, "output_bytes": 1000}


EXIT = {
    "exit_code": 0, "signal": None, "timed_out": False, "killed": False, "kill_rung": 0, "dropped_bytes": 0,
    "out_of_memory": False, "memory_limit_bytes": None, "memory_peak_bytes": None, "duration_ms": 1,
}  # fmt: skip


def failed(code, message=""):
    return json.dumps({"code": code, "message": message}).encode()


def done(**changes):
    return json.dumps({**EXIT, **changes}).encode()


def listening():
    """What an agent can dial."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0sandfleet-test-{random.getrandbits(64):x}")
    listener.listen(1)
    listener.setblocking(False)
    return listener


async def accepted(listener, *, again):
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    return await AgentLink.greet(connection, SECRET, again=again)


@asynccontextmanager
async def linked(hello=HELLO, *, again=False):
    """A link and the agent's raw end of it."""
    listener = listening()
    reader, writer = await asyncio.open_unix_connection(listener.getsockname())
    writer.write(hello)
    try:
        link = await accepted(listener, again=again)
        serving = asyncio.create_task(serve(link))
        try:
            yield link, reader, writer
        finally:
            link.close("the test is over")
            await serving
    finally:
        listener.close()
        writer.transport.abort()


async def start(link, kind, spec, most_bytes):
    operation = link.begin(kind, spec, most_bytes)
    await link.flushed()
    return operation


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
        await start(link, wire.EXEC, spec, 1000)
