"""Forwards TCP from an address of this machine to the same ports of 127.0.0.1, for peers of one network and of this machine.

``python -m sandfleet.localstack.forwarder ADDRESS NETWORK PORT…``. Servers of a local stack listen on the loopback
address; this lets containers reach them. Linux takes packets for any of its addresses on any interface, so an address
that only containers use is no guard: peers beyond NETWORK are refused, and such as pretend to be in it get no answer. This
machine's own processes have any address of it, since the Docker Engine masquerades what is sent from its networks' addresses.
"""

import asyncio
import signal
import socket
import sys
from contextlib import suppress
from ipaddress import ip_address, ip_network

_CHUNK = 64 * 1024


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, and the end of it."""
    with suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def may_pass(peer: str, network: str) -> bool:
    """Whether an address is of the network or of this machine."""
    if ip_address(peer) in ip_network(network):
        return True
    with socket.socket() as probe:
        try:
            probe.bind((peer, 0))
        except OSError:
            return False
    return True


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, network: str, port: int
) -> None:
    peer = writer.get_extra_info("peername")
    if peer is None or not may_pass(peer[0], network):
        writer.transport.abort()
        return
    try:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.transport.abort()
        return
    try:
        await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
    finally:
        for each in (server_writer, writer):
            each.close()


async def forward(address: str, network: str, ports: list[int]) -> None:
    """Forward until SIGTERM. Raises OSError if the address cannot be used."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    servers = []
    for port in ports:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
            await _forward(reader, writer, network, port)

        servers.append(await asyncio.start_server(serve, address, port))
    await stop.wait()
    for server in servers:
        server.close()


if __name__ == "__main__":
    asyncio.run(forward(sys.argv[1], sys.argv[2], [int(port) for port in sys.argv[3:]]))
