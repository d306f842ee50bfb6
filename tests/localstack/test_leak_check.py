"""The check after each test notices what it is there for."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress

import psycopg
import pytest
import redis.asyncio

from sandfleet.fleet.host import firewall
from tests import leaks
from tests.fixtures_servers import TestServers


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left on purpose does not go away by waiting."""
    monkeypatch.setattr(leaks, "SETTLED_S", 0.2)


async def test_it_finds_a_process(servers: TestServers) -> None:
    """Breaks if descendants are not looked for."""
    before = leaks.descendants()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(AssertionError, match=str(child.pid)):
        await leaks.check_processes([servers.supervisor], before)
    child.kill()
    await child.wait()
    await leaks.check_processes([servers.supervisor], before)


async def test_it_finds_a_key_without_an_end(servers: TestServers, redis_url: str) -> None:
    """Breaks if only the first database is scanned."""
    client = redis.asyncio.Redis.from_url(redis_url)
    await client.set("for ever", 1)
    with pytest.raises(AssertionError, match="for ever"):
        await leaks.check_redis(servers.at.redis_url)
    await client.expire("for ever", 60)
    await leaks.check_redis(servers.at.redis_url)
    await client.aclose()


async def test_it_finds_an_open_transaction(servers: TestServers, database: str) -> None:
    """Breaks if connections are only counted."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await connection.execute("select 'left open'")
        with pytest.raises(AssertionError, match="left open"):
            await leaks.check_connections(servers.admin_url, 100)
    await leaks.check_connections(servers.admin_url, 100)


async def test_it_finds_too_many_connections(servers: TestServers, database: str) -> None:
    """Breaks if ``most`` is not looked at."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True):
        with pytest.raises(AssertionError, match="connections left behind"):
            await leaks.check_connections(servers.admin_url, 0)


async def test_it_finds_a_bridge_and_a_namespace(engine: str) -> None:
    """Breaks if only networks of the engine are looked for: a bridge may outlive its network."""
    number = f"{os.getpid():x}"
    bridge, namespace = f"{firewall.BRIDGE_PREFIX}{number}", f"sft{number}left"
    before = await asyncio.to_thread(leaks.network_traces, engine)
    for command in (f"link add {bridge} type bridge", f"netns add {namespace}"):
        subprocess.run(["ip", *command.split()], check=True)
    try:
        with pytest.raises(AssertionError, match=f"bridge {bridge}, namespace {namespace}"):
            await leaks.check_networks(engine, before)
    finally:
        for command in (f"link del {bridge}", f"netns del {namespace}"):
            subprocess.run(["ip", *command.split()], check=True)
    await leaks.check_networks(engine, before)


async def test_it_finds_rules_of_the_firewall(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if rules may stay when nobody is there who needs them."""
    monkeypatch.setattr(leaks, "_others_here", lambda: False)
    before = await asyncio.to_thread(leaks.network_traces, engine) - {"rules of the firewall"}
    await firewall.Firewall().ensure()
    with pytest.raises(AssertionError, match="rules of the firewall"):
        await leaks.check_networks(engine, before)
    with suppress(firewall.FirewallError):  # another session has networks
        await firewall.uninstall()
