"""The forward proxy of one sandbox with the policy ``allowlist``: HTTP and CONNECT, to named domains only.

It listens on a unix socket in the sandbox's folder; the agent joins it with a port of the sandbox's loopback. So the
caller is known by the socket, there is no network to filter, and names are looked up on this side only: for domains
of the list, and never for any other.
"""

import asyncio
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import h11

from sandfleet.fleet.host import metrics
from sandfleet.fleet.host.closed_ranges import is_open
from sandfleet.fleet.host.proxy_http import Exchange, refuse
from sandfleet.fleet.host.tls_name import ClientHello, NotTls
from sandfleet.fleet.sandbox_agent.relay import PROXY_SOCKET

logger = logging.getLogger(__name__)

_CONNECTIONS = 64  # of a sandbox at once
_STARTS_PER_S = 200  # of a sandbox
_BYTES_PER_S = (
    32 * 1024 * 1024
)  # of a sandbox, both directions together: one must not take this process's time
_LEAST_BYTES = 16 * 1024  # what a read counts at least: one of a byte takes as long as one of so many
_HEAD_COST = 64  # times as long as a byte that is passed on takes one that is parsed
_BURST_S = 0.25
_HEAD_BYTES = 32 * 1024
_HEAD_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 15.0
_IDLE_S = 300.0
_REPORT_EVERY_S = 60.0
_CHUNK = 64 * 1024
_PORTS = {b"CONNECT": 443}  # every other method is plain HTTP
_PLAIN_PORT = 80

Resolve = Callable[[str, int], Awaitable[list[str]]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Refused(Exception):
    """A request that is not passed on. ``kind`` is for the log and holds nothing of the tenant's."""

    def __init__(self, kind: str, message: str, status: int = 403) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status


async def resolve(host: str, port: int) -> list[str]:
    """IPv4 addresses of a name, by this machine's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
    )
    return [str(entry[4][0]) for entry in found]


class Proxy:
    """Serves until closed. Logs, once a minute, how much went to which entry of the list and why requests were refused."""

    def __init__(self, sandbox_id: str, domains: tuple[str, ...], lookup: Resolve = resolve) -> None:
        self._sandbox_id = sandbox_id
        self._domains = domains
        self._lookup = lookup
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._serving: set[asyncio.Task[None]] = set()
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])  # requests, bytes up, down
        self._reported = time.monotonic()
        self._paced = 0.0

    async def open(self, folder: Path) -> None:
        """Listen in the sandbox's folder, if there are domains."""
        if not self._domains:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        directory = os.open(folder, os.O_PATH)
        try:  # by the descriptor: the path may be longer than the 107 bytes that a socket's may have
            path = f"/proc/self/fd/{directory}/{PROXY_SOCKET}"
            (folder / PROXY_SOCKET).unlink(missing_ok=True)
            listener.bind(path)
            (folder / PROXY_SOCKET).chmod(0o666)  # the sandbox has another user
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(directory)
        listener.listen(_CONNECTIONS)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name=f"proxy of {self._sandbox_id}")

    async def close(self) -> None:
        """End all connections and write the last report."""
        if self._accepting is None or self._listener is None:
            return
        tasks = [self._accepting, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._report()

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections as they come, but never too many or too quickly: the others wait, and cost nothing."""
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptors
                self._slots.release()
                await asyncio.sleep(1.0)
                continue
            task = asyncio.create_task(self._serve(connection), name=f"proxy of {self._sandbox_id}")
            self._serving.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(1 / _STARTS_PER_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._slots.release()

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_CHUNK)
        try:
            await self._exchange(reader, writer)
        except Refused as refused:
            self._counts[f"refused: {refused.kind}"][0] += 1
            metrics.PROXY_REFUSALS.labels(refused.kind).inc()
            with suppress(OSError):
                await refuse(writer, refused.status, refused.message)
        except (OSError, TimeoutError, h11.ProtocolError, asyncio.IncompleteReadError):
            self._counts["broken"][0] += 1
        finally:
            writer.close()
            if time.monotonic() - self._reported > _REPORT_EVERY_S:
                self._report()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(reader, writer, _HEAD_BYTES)
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            request = await exchange.head(self._head_read)
        host, port, path = _target(request)
        entry = self._entry(host)
        if port != _PORTS.get(request.method, _PLAIN_PORT):
            raise Refused("port", "only HTTPS on port 443 (CONNECT) and HTTP on port 80 are passed on")
        far = await self._connect(host, port)
        try:
            if request.method == b"CONNECT":
                await exchange.accept_tunnel()
                await self._tunnel((reader, writer), far, host, entry, exchange.trailing)
            else:
                count = self._counter(entry)
                async with asyncio.timeout(_IDLE_S) as limit:
                    await exchange.pass_on(far, host, path, lambda up, down: count(limit, up, down))
            self._counts[entry][0] += 1
        finally:
            far[1].close()

    def _entry(self, host: str) -> str:
        """The entry of the list that opens a domain."""
        for entry in self._domains:
            if host == entry or (entry.startswith("*.") and host.endswith(entry[1:])):
                return entry
        raise Refused("domain", f"this sandbox may reach {', '.join(self._domains)}, and nothing else")

    async def _connect(self, host: str, port: int) -> Streams:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                addresses = await self._lookup(host, port)
                # A name of the list may be pointed anywhere by its owner: at this machine, at a cloud's metadata.
                public = [address for address in addresses if is_open(address) and not _is_ours(address)]
                if addresses and not public:
                    raise Refused("address", "the domain's address is not one of the public internet (IPv4)")
                for address in public:
                    with suppress(OSError):
                        return await asyncio.open_connection(address, port, limit=_CHUNK)
        except (OSError, TimeoutError, UnicodeError):
            pass
        raise Refused("unreachable", "the domain has no address, or nothing answers there", 502)

    async def _tunnel(self, near: Streams, far: Streams, host: str, entry: str, first: bytes) -> None:
        hello, said = ClientHello(), bytearray(first)
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            while (name := _named(hello, first)) is None:
                first = await near[0].read(_CHUNK)
                if not first:
                    raise Refused("no tls", "the tunnel was closed before TLS began")
                await self._head_read(len(first))
                said += first
        if name != host:  # else another site behind the same address could be had
            raise Refused("tls name", "the name in TLS is not the one that was asked for")
        count = self._counter(entry)
        async with asyncio.timeout(_IDLE_S) as limit:
            far[1].write(said)
            await count(limit, len(said), 0)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_copy(near[0], far[1], lambda size: count(limit, size, 0)))
                ways.create_task(_copy(far[0], near[1], lambda size: count(limit, 0, size)))

    def _counter(self, entry: str) -> Callable[[asyncio.Timeout, int, int], Awaitable[None]]:
        async def count(limit: asyncio.Timeout, up: int, down: int) -> None:
            sums = self._counts[entry]
            sums[1] += up
            sums[2] += down
            limit.reschedule(asyncio.get_running_loop().time() + _IDLE_S)
            await self._pace(up + down)

        return count

    async def _head_read(self, size: int) -> None:
        await self._pace(_HEAD_COST * size)

    async def _pace(self, size: int) -> None:
        """Wait until what was read, and all that was before it, fits into this sandbox's share."""
        now = time.monotonic()
        self._paced = max(self._paced, now - _BURST_S) + max(size, _LEAST_BYTES) / _BYTES_PER_S
        if self._paced > now:
            await asyncio.sleep(self._paced - now)

    def _report(self) -> None:
        """Names in it are the operator's own: entries of the list, never what a sandbox asked for."""
        for what, (requests, up, down) in self._counts.items():
            logger.info(
                "proxied",
                extra={
                    "sandbox": self._sandbox_id,
                    "entry": what,
                    "requests": requests,
                    "up": up,
                    "down": down,
                },
            )
        self._counts.clear()
        self._reported = time.monotonic()


def _target(request: h11.Request) -> tuple[str, int, str]:
    """Host in lower case, port and path of what is asked for."""
    target = request.target.decode("ascii", "replace")
    url = urlsplit(f"//{target}" if request.method == b"CONNECT" else target)
    try:
        host, port = (url.hostname or "").rstrip("."), url.port
    except ValueError:
        host, port = "", None
    if not host or (request.method != b"CONNECT" and url.scheme != "http"):
        raise Refused("request", "this is a forward proxy for http:// and https://", 400)
    path = url.path or "/"
    return host, port or _PORTS.get(request.method, _PLAIN_PORT), f"{path}?{url.query}" if url.query else path


def _named(hello: ClientHello, data: bytes) -> str | None:
    try:
        return hello.feed(data)
    except NotTls as error:
        raise Refused("no tls", "only TLS with the name of the server goes through a tunnel") from error


def _is_ours(address: str) -> bool:
    """Whether this machine has the address: then, and only then, it can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


async def _copy(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, passed: Callable[[int], Awaitable[None]]
) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
        await passed(len(data))
    with suppress(OSError):
        sink.write_eof()
