"""The API's calls of sandbox hosts that break off, do not answer or refuse, on a real database; what answers is ours."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from aiohttp import web

from sandfleet.functions.api import sandbox_exec, sandbox_use
from sandfleet.functions.api.host_ask import Ask, Once
from sandfleet.functions.api.resources import Resources
from sandfleet.functions.api.sandbox_use import Use
from sandfleet.shared.errors import Conflict, HostBroke
from sandfleet.shared.ids import Fence, Owner, RunKey, new_id
from sandfleet.shared.store import sandboxes
from sandfleet.shared.store.sandboxes import Wish
from tests.api.conftest import make_settings
from tests.waiting import eventually

Answer = Callable[[web.Request], Awaitable[web.Response]]
WISH = Wish("default", 600.0, "{}", None)


@pytest.fixture
async def found(database: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Resources]:
    settings = make_settings(database, redis_url, host_secret="secret", host_socket=tmp_path / "none")
    opened = Resources(settings)
    await opened.open()
    async with opened.pool.connection() as connection:
        await connection.execute("truncate sandboxes, placements, hosts")
    yield opened
    await opened.aclose()


@asynccontextmanager
async def host(found: Resources, answer: Answer) -> AsyncIterator[None]:
    """A host that beats and gives every request to ``answer``."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with found.pool.connection() as connection:
            await connection.execute(
                """insert into hosts (host_id, instance, address, remote, backend, room, sandboxes, memory, pids, most,
                     memory_taken, pids_taken, draining, heartbeat_at, templates)
                   values ('h', 'i', 'unix:x', %s, 'docker', 1, 0, 1000, 100, 10, 0, 0, false,
                     clock_timestamp() + interval '1 hour', '{"default": {"memory": 1, "pids": 1, "lifetime_s": 3600}}')""",
                (f"http://127.0.0.1:{runner.addresses[0][1]}",),
            )
        yield
    finally:
        await runner.cleanup()


async def use_of_a_sandbox(found: Resources) -> Use:
    """The use of one that is made."""
    key = RunKey("a", "u", new_id())
    assert await sandboxes.create(found.pool, key, WISH, None, 10) == ("placed", None)
    assert await sandboxes.made(found.pool, Fence(key, 1), "known", None)
    return Use(found, key)


async def test_a_file_that_cannot_be_sent_again_is_not_taken_for_an_empty_one(found: Resources) -> None:
    """The host refuses the generation that was the newest a moment ago. Red when the request is sent again as it is: of its
    body nothing is left, and the file is replaced by nothing."""
    seen: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.read())
        if len(seen) == 1:
            return web.json_response({"error": {"code": "superseded", "message": "later"}}, status=403)
        return web.json_response({"size": len(seen[-1])})

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data"

    async with host(found, answer):
        use = await use_of_a_sandbox(found)
        with pytest.raises(Conflict, match="send it again"):
            await use.json(Ask("PUT", "/sandbox/file", content=Once(pieces())))
        assert seen == [b"data"]
        seen.clear()
        assert await use.json(Ask("PUT", "/sandbox/file", content=b"whole")) == {"size": 5}
        assert seen == [b"whole", b"whole"]


async def test_a_command_is_not_followed_for_ever_where_connections_are_taken_and_reset(
    found: Resources,
) -> None:
    """As by a proxy whose host is gone. Red when each reset renews the patience."""

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with host(found, answer):
        use = await use_of_a_sandbox(found)
        with patch.object(sandbox_exec, "_RESUME_S", 0.1), pytest.raises(HostBroke, match="is not known"):
            await asyncio.wait_for(anext(sandbox_exec.follow(found, use, {"command": "true"})), 60)


async def test_a_command_whose_host_breaks_off_before_its_answer_is_told_to_have_started_once(
    found: Resources,
) -> None:
    """The host takes the command and goes, and the next one knows it. Red when only the first answer is told of: the stream
    then has no `started`, and nobody hears in which generation the command runs."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) == 1:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(text='{"event": "exit", "exit_code": 0}\n')

    async with host(found, answer):
        use = await use_of_a_sandbox(found)
        events = [event async for event in sandbox_exec.follow(found, use, {"command": "true"})]
        assert events == [("started", {"generation": 1}), ("exit", {"exit_code": 0})]
        assert ["resume" in each for each in asked] == [False, True]


async def test_a_host_may_be_silent_for_no_longer_than_its_sandbox_lives(found: Resources) -> None:
    """Red when a command without a time limit is waited for as long as any sandbox may live."""

    async def answer(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with host(found, answer):
        use = await use_of_a_sandbox(found)
        with patch.object(sandbox_use, "_ENDS_S", 0.5 - (WISH.ttl_s or 0)), pytest.raises(HostBroke):
            await asyncio.wait_for(use.open(Ask("POST", "/sandbox/exec", json={}, silence_s=86_400)), 60)


async def test_a_machine_that_vanishes_is_noticed_while_nothing_is_sent(found: Resources) -> None:
    """By the kernel. Red when connections have no keepalive: a silent command would be waited for until its sandbox's end."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    async with host(found, answer):
        response = await (await use_of_a_sandbox(found)).open(Ask("GET", "/sandbox/stat"))
        wire = response.extensions["network_stream"].get_extra_info("socket")
        assert wire.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        await response.aclose()


async def test_who_hangs_up_leaves_no_sandbox_behind_however_often_it_is_cancelled(
    found: Resources, database: str
) -> None:
    """Whoever has no patience with a cancellation cancels again. Red when that ends the removal: the room is taken until
    the sandbox's time is over."""
    asked = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def rows(query: str) -> list[Any]:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
            return await (await connection.execute(query)).fetchall()  # type: ignore[arg-type]

    async with host(found, answer):
        creating = asyncio.create_task(sandbox_use.create(found, Owner("a", "u"), WISH))
        await asyncio.wait_for(asked.wait(), 60)
        async with await psycopg.AsyncConnection.connect(database) as holder:
            await holder.execute("select 1 from sandboxes for update")
            creating.cancel()
            waiting = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            await eventually(lambda: rows(waiting), what="the removal")
            creating.cancel()
            await asyncio.wait([creating])
        assert creating.cancelled()
        left = "select 1 where (select count(*) from sandboxes) + (select count(*) from placements) = 0"
        await eventually(lambda: rows(left), what="its end")
