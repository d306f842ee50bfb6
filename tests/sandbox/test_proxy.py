"""The forward proxy alone: what it passes on, what it refuses, and what it looks up."""

import asyncio
import json
import logging
import ssl
import sys
import time
from contextlib import asynccontextmanager, suppress

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandfleet.fleet.host import proxy as proxy_module
from sandfleet.fleet.host.closed_ranges import is_open
from sandfleet.fleet.host.proxy import Proxy
from sandfleet.fleet.host.tls_name import ClientHello, NotTls
from tests.waiting import eventually

DOMAINS = ("allowed.example", "*.wild.example")


class Names:
    """A resolver that gives every name the address of this machine's loopback, and keeps who was asked for."""

    def __init__(self):
        self.asked = []

    async def __call__(self, host, port):
        self.asked.append(host)
        return ["127.0.0.1"]


@asynccontextmanager
async def proxied(folder, monkeypatch, port=None, **constants):
    """A proxy, the way to speak with it, and its resolver. With ``port`` the loopback counts as public."""
    names = Names()
    if port is not None:
        monkeypatch.setattr(proxy_module, "is_open", lambda _: True)
        monkeypatch.setattr(proxy_module, "_is_ours", lambda _: False)
        connect = asyncio.open_connection
        monkeypatch.setattr(asyncio, "open_connection", lambda host, _, **more: connect(host, port, **more))
    for name, value in constants.items():
        monkeypatch.setattr(proxy_module, name, value)
    made = Proxy("of-this-test", DOMAINS, names)
    await made.open(folder)

    async def say(*pieces, end=True):
        reader, writer = await asyncio.open_unix_connection(str(folder / "proxy.sock"))
        for piece in pieces:
            writer.write(piece)
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer

    try:
        yield made, say, names
    finally:
        await made.close()


@asynccontextmanager
async def server(answer=b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"):
    """A web server that keeps what it was sent: its port, and that."""
    heard = bytearray()

    async def serve(reader, writer):
        while data := await reader.read(65536):
            heard.extend(data)
            if heard.endswith((b"\r\n\r\n", b"END")):
                break
        writer.write(answer)
        await writer.drain()
        writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with made:
        yield made.sockets[0].getsockname()[1], heard


def hello(name):
    """The first message of TLS to a server of that name."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "target",
    [
        "http://evil.example/",
        "http://notallowed.example/",
        "http://wild.example/",
        "http://a.wild.example.evil.example/",
        "http://allowed.example@evil.example/",
        "http://evil.example\\@allowed.example@evil.example/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://2130706433/",
    ],
)
async def test_a_name_that_is_not_on_the_list_is_neither_reached_nor_looked_up(tmp_path, monkeypatch, target):
    """Red when the list is compared by its beginning or its end, or a name is resolved first: a lookup carries data."""
    async with proxied(tmp_path, monkeypatch, port=1) as (_, say, names):
        answer = await say(f"GET {target} HTTP/1.1\r\nHost: allowed.example\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 "), answer
        assert b"may reach allowed.example, *.wild.example, and nothing else" in answer
        authority = target.split("/")[2]
        answer = await say(f"CONNECT {authority}:443 HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        assert not answer.startswith(b"HTTP/1.1 200 ")
        assert names.asked == []


@pytest.mark.parametrize(
    "host", ["allowed.example", "ALLOWED.Example", "allowed.example.", "a.b.wild.example"]
)
async def test_a_domain_of_the_list_is_reached(tmp_path, monkeypatch, host):
    async with server() as (port, _), proxied(tmp_path, monkeypatch, port=port) as (_, say, names):
        answer = await say(f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.endswith(b"hello")
        assert names.asked == [host.lower().rstrip(".")]


async def test_the_server_sees_the_domain_that_was_checked(tmp_path, monkeypatch):
    """Red when the client's Host header is passed on: another site behind the same address could be had."""
    async with server() as (port, heard), proxied(tmp_path, monkeypatch, port=port) as (_, say, _):
        await say(
            b"GET http://allowed.example/a?b=c HTTP/1.1\r\nHost: other.example\r\nProxy-Authorization: me\r\n"
            b"Connection: x-hop\r\nX-Hop: 1\r\nX-Kept: 2\r\n\r\n"
        )
        lines = bytes(heard).lower().split(b"\r\n")
        assert lines[0] == b"get /a?b=c http/1.1"
        assert [line for line in lines if line.startswith(b"host")] == [b"host: allowed.example"]
        assert b"x-kept: 2" in lines
        assert not [line for line in lines if line.startswith((b"proxy", b"x-hop"))]


async def test_a_body_is_passed_on_and_no_second_request_behind_it(tmp_path, monkeypatch):
    """Red when bytes are copied blindly: the second request would go to another site of the same server unchecked."""
    async with server() as (port, heard), proxied(tmp_path, monkeypatch, port=port) as (_, say, _):
        answer = await say(
            b"POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 6\r\n\r\nabcEND"
            b"GET http://allowed.example/second HTTP/1.1\r\nHost: other.example\r\n\r\n"
        )
        assert bytes(heard).endswith(b"\r\n\r\nabcEND")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "asked", ["CONNECT allowed.example:22", "CONNECT allowed.example:80", "GET http://allowed.example:6379/"]
)
async def test_only_the_ports_of_the_web_are_passed_on(tmp_path, monkeypatch, asked):
    async with proxied(tmp_path, monkeypatch, port=1) as (_, say, names):
        answer = await say(f"{asked} HTTP/1.1\r\nHost: allowed.example\r\n\r\n".encode())
        assert b"only HTTPS on port 443 (CONNECT) and HTTP on port 80" in answer
        assert names.asked == []


async def test_a_domain_that_points_to_this_machine_is_refused(tmp_path, monkeypatch):
    """Red without the check of the address: who owns a domain of the list could aim it at the machine's services."""
    async with proxied(tmp_path, monkeypatch) as (_, say, _):
        answer = await say(b"GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"not one of the public internet" in answer


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "172.31.255.255", "192.168.0.1", "100.100.100.200", "0.0.0.0",
                "224.0.0.1", "255.255.255.255", "::1", "fd00:ec2::254", "::ffff:8.8.8.8", "2606:4700::1", "no address"],
)  # fmt: skip
def test_addresses_that_are_not_public_are_closed(address):
    assert not is_open(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "11.22.33.10", "223.255.255.255"]
)
def test_public_addresses_are_open(address):
    assert is_open(address)


async def test_a_tunnel_carries_tls_to_the_domain_that_was_asked_for(tmp_path, monkeypatch):
    """Red when a tunnel takes any bytes: any site that shares the address, or any protocol, would be within reach."""
    first = hello("allowed.example")
    connect = b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n"
    async with (
        server(b"from the server") as (port, heard),
        proxied(tmp_path, monkeypatch, port=port) as (_, say, _),
    ):
        assert (await say(connect, first, b"END")).endswith(b"\r\n\r\nfrom the server")
        assert bytes(heard) == first + b"END"
        heard.clear()
        for other in (
            hello("other.example"),
            b"SSH-2.0-OpenSSH_9\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x00\x05hello",
        ):
            assert b"from the server" not in await say(connect, other, b"END")
        assert bytes(heard) == b""


async def test_a_first_message_in_many_pieces_is_understood(tmp_path, monkeypatch):
    first = hello("allowed.example")
    async with (
        server(b"from the server") as (port, _),
        proxied(tmp_path, monkeypatch, port=port) as (_, say, _),
    ):
        pieces = [first[n : n + 1] for n in range(len(first))]
        answer = await say(b"CONNECT allowed.example:443 HTTP/1.1\r\nHost: a\r\n\r\n", *pieces, b"END")
        assert answer.endswith(b"from the server")


def server_name(data):
    return ClientHello().feed(data)


def test_a_servers_name_is_read_and_nothing_else_is_taken_for_one():
    first = hello("a.Wild.example")
    assert server_name(first) == "a.wild.example"
    for size in range(len(first)):
        assert server_name(first[:size]) is None
    for at in range(len(first)):
        for value in (0, 255):
            changed = first[:at] + bytes([value]) + first[at + 1 :]
            try:
                assert server_name(changed) in (None, "a.wild.example") or at > 50
            except NotTls:
                pass
    for rubbish in (b"\x15\x03\x01", b"GET /", b"\x16" * 40_000):
        with pytest.raises(NotTls):
            server_name(rubbish)


def records(message, *sizes):
    """A handshake message cut into records of these sizes, and what is left."""
    cut = b""
    for size in (*sizes, len(message)):
        if part := message[:size]:
            cut += b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
        message = message[size:]
    return cut


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x00\x00",
        records(b"\x01\x00\x00\x10" + bytes(14), *[1] * 20),
        b"\x16\x03\x01\x40\x01",
        records(b"\x01\x01\x00\x00"),
        records(b"\x02\x00\x00\x01\x00"),
    ],
    ids=[
        "an empty record",
        "a record for each byte",
        "a record too long",
        "a message too long",
        "another message",
    ],
)
def test_what_no_client_says_ends_it_at_once(said):
    """Red when records may be empty or without number, or a message may be announced that is longer than any hello."""
    with pytest.raises(NotTls):
        server_name(said)


def steps(pieces):
    """How many steps of the interpreter it takes to read these."""
    taken, hello = 0, ClientHello()

    def count(frame, event, _):
        nonlocal taken
        frame.f_trace_opcodes = True
        taken += event == "opcode"
        return count

    sys.settrace(count)
    try:
        for piece in pieces:
            assert hello.feed(piece) is None
    finally:
        sys.settrace(None)
    return taken


def test_bytes_that_dribble_in_are_read_once():
    """Red when every read parses anew from the start: 64 connections that send a byte each would take the host's CPU."""
    said = records(b"\x01\x00\x40\x00" + bytes(9000), *[600] * 14)
    few, many = steps([said[:400]] + [b"\0"] * 100), steps([said[:8700]] + [b"\0"] * 100)
    assert many < 3 * few


@given(st.integers(0, 400), st.lists(st.integers(1, 200), max_size=12), st.data())
def test_however_a_hello_is_cut_it_says_the_same(padding, sizes, data):
    """Red when a record's or a read's border is taken for a part's."""
    message = hello("a.wild.example")[5:]
    said = records(message, *sizes) + bytes(padding)
    reader, name = ClientHello(), None
    while said and name is None:
        cut = data.draw(st.integers(1, len(said)))
        name = reader.feed(said[:cut])
        said = said[cut:]
    assert name == "a.wild.example"


HELLO = hello("a.wild.example")


@given(
    st.one_of(
        st.binary(max_size=300),
        st.builds(
            lambda at, put, drop: HELLO[:at] + put + HELLO[at + drop :],
            st.integers(0, len(HELLO)), st.binary(max_size=6), st.integers(0, 6),
        ),
        st.builds(
            lambda message, sizes: records(message, *sizes), st.binary(min_size=1, max_size=100), st.lists(st.integers(1, 9))
        ),
    ),
    st.integers(1, 50),
)  # fmt: skip
def test_no_bytes_raise_anything_else_than_that_they_are_no_tls(said, piece):
    """Red when a length is believed, or a name is not ASCII."""
    reader = ClientHello()
    with suppress(NotTls):
        for at in range(0, len(said), piece):
            name = reader.feed(said[at : at + piece])
            if name is not None:
                assert name.isascii()
                assert name == name.lower()
                break


@pytest.mark.parametrize(
    ("said", "cost"),
    [(b"GET http://allowed.example/ HTTP/1.1\r\n" + b"a:b\r\n" * 6000, 64 * 30_000), (b"G", 16 * 1024)],
    ids=["many headers", "one byte"],
)
async def test_heads_are_parsed_at_the_pace_of_their_sandbox(tmp_path, monkeypatch, said, cost):
    """Red when only what is passed on is paced: a sandbox takes the host's CPU with heads, which take long to parse, or
    with reads of one byte. Here the pace is so slow that nothing is parsed yet."""
    parsed = []
    monkeypatch.setattr(h11.Connection, "receive_data", lambda _, data: parsed.append(data))
    async with proxied(tmp_path, monkeypatch, _BURST_S=0.0, _BYTES_PER_S=1) as (made, _, _):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "proxy.sock"))
        writer.write(said)
        await eventually(lambda: made._paced - time.monotonic() > cost * 0.9, what="it waits for its turn")
        assert not parsed
        writer.close()


async def test_more_connections_than_a_sandbox_may_hold_wait(tmp_path, monkeypatch):
    """Red without the limit: one sandbox could take all descriptors of the host."""
    async with proxied(tmp_path, monkeypatch, _CONNECTIONS=3) as (made, say, _):
        held = [await asyncio.open_unix_connection(str(tmp_path / "proxy.sock")) for _ in range(3)]
        await eventually(lambda: len(made._serving) == 3, what="three are served")
        fourth = asyncio.create_task(say(b"GET http://evil.example/ HTTP/1.1\r\nHost: a\r\n\r\n"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(fourth), 0.2)
        for _, writer in held:
            writer.close()
        assert b"403" in await fourth


@pytest.mark.parametrize(
    "said",
    [b"\0" * 100, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET http://allowed.example/ HTTP/1.1\r\n" + b"x: y\r\n" * 10_000,
     b"GET http://allowed.example:99999/ HTTP/1.1\r\nHost: a\r\n\r\n", b"CONNECT  HTTP/1.1\r\nHost: a\r\n\r\n", b"",
     b"GET http://allowed.example/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"],
)  # fmt: skip
async def test_nonsense_ends_its_connection_only(tmp_path, monkeypatch, said):
    async with server() as (port, _), proxied(tmp_path, monkeypatch, port=port) as (_, say, _):
        assert b"hello" not in await say(said, end=b"x: y" not in said)
        assert (await say(b"GET http://allowed.example/ HTTP/1.1\r\nHost: a\r\n\r\n")).endswith(b"hello")


async def test_a_client_that_says_nothing_is_left(tmp_path, monkeypatch):
    """Red without the time limit: connections would be held for ever."""
    async with proxied(tmp_path, monkeypatch, _HEAD_TIMEOUT_S=0.05) as (_, say, _):
        assert await say(b"GET http://all", end=False) == b""


async def test_the_log_tells_how_much_and_nothing_of_the_tenants(tmp_path, monkeypatch, caplog):
    """Red when names or paths that a sandbox asked for are logged, or every request is: the log would fill the disk."""
    caplog.set_level(logging.INFO)
    async with server() as (port, _), proxied(tmp_path, monkeypatch, port=port) as (_, say, _):
        for _ in range(5):
            await say(b"GET http://allowed.example/secret-path HTTP/1.1\r\nHost: a\r\n\r\n")
            await say(b"GET http://secret-name.evil.example/ HTTP/1.1\r\nHost: a\r\n\r\n")
    records = [record.__dict__ for record in caplog.records if record.getMessage() == "proxied"]
    assert [(r["sandbox"], r["entry"], r["requests"]) for r in records] == [
        ("of-this-test", "allowed.example", 5),
        ("of-this-test", "refused: domain", 5),
    ]
    assert records[0]["down"] > 0
    assert "secret" not in json.dumps(records, default=str)
