"""The way of an emulator's tasks to the servers of this machine."""

import asyncio
import itertools
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress

import psutil
import pytest

from sandfleet.localstack.forwarder import may_pass
from sandfleet.localstack.process import free_port, tcp_answers
from tests.waiting import eventually

ADDRESS = "127.0.0.2"  # any but the servers' own


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine."""
    addresses = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    return [each.address for each in addresses if each.family == socket.AF_INET]


@pytest.mark.parametrize(
    ("peer", "passes"),
    [
        ("172.18.0.5", True),
        *((own, True) for own in own_addresses()),  # as the engine masquerades this machine's processes
        ("172.19.0.5", False),  # another network's container
        ("203.0.113.7", False),  # another machine
    ],
)
def test_only_the_networks_containers_and_this_machine_pass(peer: str, passes: bool) -> None:
    """Red when whoever can route to the address reaches the servers, or when functions, which run on this machine, do not."""
    assert may_pass(peer, "172.18.0.0/16") is passes


@asynccontextmanager
async def forwarder(port: int):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "sandfleet.localstack.forwarder", ADDRESS, "172.18.0.0/16", str(port))
    )
    try:
        await eventually(lambda: tcp_answers(port, ADDRESS), 60, "the forwarder")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_what_is_sent_arrives_whole_and_its_end_too() -> None:
    """Both ways, also when one side has ended its part. Red when the end is not passed on: PostgreSQL would keep the
    connections of containers that were killed."""
    sent, port = b"x" * 3_000_000, free_port()
    heard = asyncio.Queue[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard.put(await reader.read())
        writer.write(sent)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port), forwarder(port):
        await heard.get()  # of who asked whether it answers
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        writer.write(sent)
        writer.write_eof()
        assert await heard.get() == sent
        assert await reader.read() == sent
        writer.close()


async def test_a_server_that_is_away_ends_the_connection() -> None:
    """Red when the peer waits for an answer that never comes."""
    port = free_port()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    async with forwarder(port):
        server.close()
        await server.wait_closed()
        reader, writer = await asyncio.open_connection(ADDRESS, port)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
