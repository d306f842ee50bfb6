"""Tokens: who may speak to a sandbox, until when, and never again after a successor did."""

import asyncio
import time
import uuid
from contextlib import asynccontextmanager

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import StaleAttempt
from sandfleet.fleet.sandbox.hosts import OneHost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.errors import SandboxError, Superseded
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.sandbox_token import SandboxTokenExpired, SandboxTokenInvalid, sign, verify
from tests.sandbox.inside import sleepers
from tests.waiting import eventually

text = st.text(st.characters(codec="utf-8"), max_size=40)
fences = st.builds(
    Fence, st.builds(RunKey, text, text, st.uuids()), st.integers(min_value=0, max_value=2**31 - 1)
)
FENCE = Fence(RunKey("acme", "ada", uuid.UUID(int=7)), 3)


@given(fences, st.floats(min_value=1, max_value=1e10), text.filter(bool))
def test_a_token_says_what_was_signed(fence, expires_at, secret):
    claim = verify(secret, sign(secret, fence, expires_at), expires_at - 1e-3)
    assert claim == (fence, expires_at)


@given(st.data())
def test_any_change_makes_it_invalid(data):
    """Red when a part of the token is not covered by the signature."""
    token = sign("secret", FENCE, 100.0)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.characters(max_codepoint=300).filter(lambda c: c != token[at]))
    with pytest.raises(SandboxTokenInvalid):
        verify("secret", token[:at] + other + token[at + 1 :], 1.0)


@given(st.text(max_size=300))
def test_what_is_no_token_is_invalid(token):
    with pytest.raises(SandboxTokenInvalid):
        verify("secret", token, 1.0)


def test_another_key_makes_it_invalid():
    with pytest.raises(SandboxTokenInvalid, match="SANDFLEET_HOST_SECRET"):
        verify("other", sign("secret", FENCE, 100.0), 1.0)


@pytest.mark.parametrize("expires_at", [10.0, 9.99, -1.0, float("nan"), float("-inf"), float("inf")])
def test_it_expires(expires_at):
    """Red when a bound is off by one, or a number that is none never expires."""
    with pytest.raises(SandboxTokenExpired):
        verify("secret", sign("secret", FENCE, expires_at), 10.0)


def test_an_empty_key_signs_nothing():
    with pytest.raises(ValueError, match="empty"):
        sign("", FENCE, 10.0)


async def call(host, method, path, token=None):
    async with aiohttp.ClientSession(
        "http://host", connector=aiohttp.UnixConnector(str(host.socket))
    ) as session:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with session.request(method, path, headers=headers) as response:
            return response.status, await response.json(content_type=None)


ROUTES = [
    ("PUT", "/sandbox"),
    ("DELETE", "/sandbox"),
    ("POST", "/sandbox/exec"),
    ("GET", "/sandbox/file?path=a"),
    ("PUT", "/sandbox/file?path=a"),
    ("GET", "/sandbox/files?path=a"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_wants_a_token_that_is_good_now(docker_host, method, path):
    """Red when a route is added that does not check."""
    fence = Fence(await docker_host.new_run(), 1)
    expired = docker_host.token(fence, valid_s=-1)
    forged = sign("another key", fence, 1e11)
    for token, code in ((None, "invalid"), ("", "invalid"), (forged, "invalid"), (expired, "expired")):
        status, body = await call(docker_host, method, path, token)
        assert (status, body["error"]["code"]) == (401, f"sandbox_token_{code}")
    assert (await docker_host.health())["sandboxes"] == 0


async def test_a_token_that_expires_on_its_way_is_replaced(host, client):
    """Red when a lease that is renewed at the last moment costs a tool call."""
    fence = Fence(await host.new_run(), 1)
    tokens = [host.token(fence, valid_s=-1)]

    async def sign_token():
        return tokens.pop() if tokens else host.token(fence)

    sandbox = RunSandbox(fence, sign_token, OneHost(client))
    assert (await sandbox.exec("echo here")).stdout == b"here\n"
    tokens.append(host.token(fence, valid_s=-1))
    assert (await sandbox.exec("echo here")).stdout == b"here\n"
    await sandbox.close()


async def test_an_earlier_attempt_is_refused_for_good(host, client):
    """Red when the host forgets the highest attempt, also across the removal of the sandbox."""
    first = await host.sandbox(client, attempt=1)
    await first.exec("true")
    second = await host.sandbox(client, key=first.fence.key, attempt=2)
    await second.exec("true")
    for call in (first.exec("true"), first.read_file("a"), first.write_file("a", b""), first.list_files()):
        with pytest.raises(Superseded):
            await call
    await first.close()
    assert (await second.exec("true")).exit_code == 0
    await second.close()
    with pytest.raises(Superseded):
        await (await host.sandbox(client, key=first.fence.key, attempt=1)).exec("true")


async def test_the_successors_first_word_kills_what_runs_for_its_predecessor(host, client):
    """Red when a superseded executor's command goes on beside the successor's."""
    first = await host.sandbox(client, attempt=1)
    running = asyncio.create_task(first.exec("setsid sleep 300 & sleep 301", timeout_s=600))

    async def started():
        assert not running.done(), running
        return (await host.health())["sandboxes"] and len(await sleepers(first)) == 2

    await eventually(started)
    second = await host.sandbox(client, key=first.fence.key, attempt=2)
    await second.list_files()
    with pytest.raises(StaleAttempt):
        await running
    assert await sleepers(second) == []
    await second.close()


@asynccontextmanager
async def raw(host, fence, valid_s=60.0):
    """A connection of an attempt, below what clients promise."""
    headers = {"Authorization": f"Bearer {host.token(fence, valid_s)}"}
    connector = aiohttp.UnixConnector(str(host.socket))
    async with aiohttp.ClientSession("http://host", connector=connector, headers=headers) as session:
        yield session


SLOW = [
    ("POST", "/sandbox/exec", b'{"command": "touch late"', b"}"),
    ("POST", "/sandbox/processes", b'{"command": "touch late"', b"}"),
    ("POST", "/sandbox/mkdir", b'{"path": "late"', b"}"),
    ("PUT", "/sandbox/file?path=late", b"half", b"half"),
    ("PUT", "/sandbox", b"", b"{}"),
]


@pytest.mark.parametrize(("method", "path", "half", "rest"), SLOW, ids=[f"{one[0]} {one[1]}" for one in SLOW])
async def test_who_is_superseded_while_his_request_comes_starts_nothing(
    docker_host, method, path, half, rest
):
    """Red when the attempt is compared before the body is read alone: an executor that was stopped in the middle of a
    request would have it done beside its successor's work."""
    client = SandboxClient(docker_host.socket)
    second = await docker_host.sandbox(client, attempt=2)
    first = Fence(second.fence.key, 1)
    begun, superseded = asyncio.Event(), asyncio.Event()

    async def body():  # is asked for once the host has answered the headers
        begun.set()
        yield half
        await superseded.wait()
        yield rest

    async with raw(docker_host, first) as session:
        async with session.put("/sandbox") as response:
            assert response.status == 200
        asking = asyncio.create_task(session.request(method, path, data=body(), expect100=True))
        await begun.wait()
        await second.exec("true")
        superseded.set()
        async with await asking as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "superseded")
    assert (await second.list_files())["entries"] == []
    await second.close()
    await client.aclose()


async def test_a_request_that_comes_for_longer_than_its_token_is_good_starts_nothing(docker_host):
    """Red when the token is looked at before the body alone: an executor that was stopped for longer than its lease would
    have it done although its run may be another's, who has not spoken to this host yet."""
    client = SandboxClient(docker_host.socket)
    owner = await docker_host.sandbox(client)
    await owner.exec("true")
    until = time.time() + 3.0

    async def body():
        yield b'{"command": "touch late"'
        await asyncio.sleep(until - time.time() + 0.1)
        yield b"}"

    async with (
        raw(docker_host, owner.fence, valid_s=3.0) as session,
        session.post("/sandbox/exec", data=body(), expect100=True) as response,
    ):
        assert (response.status, (await response.json())["error"]["code"]) == (401, "sandbox_token_expired")
    assert (await owner.list_files())["entries"] == []
    await owner.close()
    await client.aclose()


async def test_who_is_superseded_before_he_says_what_to_attach_starts_nothing(docker_host):
    """Red when the attempt is compared at the handshake alone: the command comes after it."""
    client = SandboxClient(docker_host.socket)
    second = await docker_host.sandbox(client, attempt=2)
    async with raw(docker_host, Fence(second.fence.key, 1)) as session:
        async with session.put("/sandbox") as response:
            assert response.status == 200
        async with session.ws_connect("/sandbox/attach") as socket:
            await second.exec("true")
            await socket.send_str('{"command": "touch late"}')
            answer = await socket.receive_json()
            assert (answer["event"], answer["code"]) == ("error", "superseded")
    assert (await second.list_files())["entries"] == []
    await second.close()
    await client.aclose()


async def test_another_runs_token_reaches_another_sandbox(docker_host):
    """Red when the path, not the token, says whose sandbox is meant: the foreign run has none."""
    client = SandboxClient(docker_host.socket)
    mine = await docker_host.sandbox(client)
    await mine.write_file("secret", b"mine")
    for who in ({"tenant": "evil"}, {"user_id": "eve"}):
        foreign = RunKey(who.get("tenant", "acme"), who.get("user_id", "ada"), mine.fence.key.run_id)
        token = docker_host.token(Fence(foreign, 9))
        with pytest.raises(SandboxError) as refused:
            await client.read(token, "secret", 0, 10)
        assert refused.value.code == "no_sandbox"
        await client.remove(token)
    assert await mine.read_file("secret") == b"mine"
    await mine.close()
    await client.aclose()
