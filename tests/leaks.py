"""What a test must not leave behind: containers, networks, processes, Redis keys without an end, busy connections."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import redis.asyncio

from sandfleet.fleet.host import firewall
from sandfleet.localstack import docker_api
from sandfleet.localstack.leftovers import LABEL, processes_of
from sandfleet.localstack.stack import Stack
from sandfleet.localstack.supervisor import Supervisor
from tests.waiting import eventually

# "Gone within 60 s" is what is promised of sandboxes.
SANDBOX_GONE_S = 60.0
SETTLED_S = 15.0


def descendants() -> set[int]:
    """Ids of all processes that this one started, directly or not."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _tree(pids: Iterator[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        with suppress(psutil.Error):
            found |= {pid} | {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def _supervised(supervisors: list[Supervisor]) -> set[int]:
    roots = [p.pid for s in supervisors for p in s.processes.values() if p.pid is not None]
    roots += [s.watchdog_pid for s in supervisors if s.watchdog_pid is not None]
    return _tree(iter(roots))


async def check_processes(supervisors: list[Supervisor], before: set[int]) -> None:
    """Whatever runs now ran before the test or is part of a running stack."""

    def extra() -> list[str]:
        known = _supervised(supervisors) | before | {os.getpid()}
        marked = {p.pid for s in supervisors for p in processes_of(s.instance)}
        names = []
        for pid in (descendants() | marked) - known:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                # A server of another stack that still runs starts one for each connection.
                backend = process.name() == "postgres" and process.ppid() in before
                if process.status() != psutil.STATUS_ZOMBIE and not backend:
                    names.append(f"{pid}: {' '.join(process.cmdline())[:200]}")
        return names

    await eventually(lambda: not extra(), SETTLED_S, f"no process left behind; left: {extra()}")


async def check_containers(stack: Stack) -> None:
    """No container and no network of the stack's is left unless its run is still going."""
    host = stack.info.docker_host
    if host is None:
        return

    async def left() -> list[str]:
        things = await asyncio.to_thread(docker_api.labelled, host, f"{LABEL}={stack.info.instance}")
        return things if things and not await _live_runs(stack.info.database_url) else []

    async def none_left() -> bool:
        return not await left()

    await eventually(none_left, SANDBOX_GONE_S, "no container or network left behind")


async def _live_runs(database_url: str) -> int:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        row = await (
            await connection.execute("select count(*) from runs where status in ('pending', 'running')")
        ).fetchone()
        return int(row[0]) if row else 0


def network_traces(docker_host: str) -> set[str]:
    """Bridges of sandboxes that no network of the engine owns, namespaces of this session, and the firewall's rules.

    The rules belong to the machine: while other sessions or hosts are there, they are not looked for.
    """
    owned = docker_api.bridges(docker_host)
    traces = {f"bridge {name}" for name in firewall.bridges() if name not in owned}
    namespaces = Path("/run/netns")
    if namespaces.is_dir():
        traces |= {f"namespace {p.name}" for p in namespaces.glob(f"sft*{os.getpid():x}*")}
    if os.geteuid() == 0 and not _others_here() and asyncio.run(firewall.installed()):
        traces.add("rules of the firewall")
    return traces


def _others_here() -> bool:
    ours = descendants() | {os.getpid()}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            arguments = process.cmdline()
            if process.pid not in ours and ("sandfleet.fleet.host" in arguments or "pytest" in arguments):
                return True
    return False


async def check_networks(docker_host: str, before: set[str]) -> None:
    """No bridge, namespace or rule is there that was not there before."""

    async def left() -> set[str]:
        return await asyncio.to_thread(network_traces, docker_host) - before

    async def none_left() -> bool:
        return not await left()

    try:
        await eventually(none_left, SETTLED_S, "no bridge, namespace or rule left behind")
    except AssertionError:
        raise AssertionError(f"left behind: {', '.join(sorted(await left()))}") from None


async def check_redis(redis_url: str) -> None:
    """Every key in every database of the server has a time to live."""
    base = redis_url.rsplit("/", 1)[0]
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        numbers = [int(name.removeprefix("db")) for name in await client.info("keyspace")]

    async def immortal() -> list[bytes]:
        keys: list[bytes] = []
        for number in numbers:
            async with redis.asyncio.Redis.from_url(f"{base}/{number}") as client:
                found = [key async for key in client.scan_iter(count=1000)]
                async with client.pipeline(transaction=False) as pipe:
                    for key in found:
                        pipe.ttl(key)
                    keys += [key for key, ttl in zip(found, await pipe.execute(), strict=True) if ttl == -1]
        return keys

    async def none() -> bool:
        return not await immortal()

    try:
        await eventually(none, min(3.0, SETTLED_S), "every Redis key has a time to live")
    except AssertionError:
        raise AssertionError(f"Redis keys without a time to live: {(await immortal())[:10]}") from None


async def check_connections(admin_url: str, most: int) -> None:
    """No transaction is left open, and no more than ``most`` clients are connected."""

    async def wrong() -> list[tuple[object, ...]]:
        async with await psycopg.AsyncConnection.connect(admin_url, autocommit=True) as connection:
            rows = await connection.execute(
                """select datname, application_name, state, left(query, 200) from pg_stat_activity
                   where backend_type = 'client backend' and pid <> pg_backend_pid()"""
            )
            clients = await rows.fetchall()
        idle = [row for row in clients if str(row[2]).startswith("idle in transaction")]
        return idle or (clients if len(clients) > most else [])

    async def none() -> bool:
        return not await wrong()

    try:
        await eventually(none, SETTLED_S, "no open transaction, no growing number of connections")
    except AssertionError:
        raise AssertionError(f"connections left behind: {await wrong()}") from None
