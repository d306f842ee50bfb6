"""Files of a sandbox, over the API."""

import httpx
import pytest

from sandfleet.functions.api.app import create_app
from tests.api.conftest import make_settings, serve
from tests.sandboxes.calls import make, run
from tests.sandboxes.conftest import Fleet


async def test_files_go_up_and_down(http: httpx.AsyncClient) -> None:
    """Whole, in parts, appended; any bytes; directories are made."""
    path = await make(http)
    data = bytes(range(256)) * 4096
    sent = await http.put(f"{path}/file", params={"path": "a/b.bin", "mode": 0o600}, content=data)
    assert sent.json() == {"size": len(data)}, sent.text
    await http.put(f"{path}/file", params={"path": "a/b.bin", "append": 1}, content=b"end")
    down = await http.get(f"{path}/file", params={"path": "/workspace/a/b.bin"})
    assert (down.status_code, down.content == data + b"end") == (200, True)
    part = await http.get(f"{path}/file", params={"path": "a/b.bin", "offset": 254, "limit": 4})
    assert part.content == b"\xfe\xff\x00\x01"
    stat = (await http.get(f"{path}/stat", params={"path": "a/b.bin"})).json()
    assert (stat["kind"], stat["size"], stat["mode"]) == ("file", len(data) + 3, 0o600)


async def test_a_large_file_goes_through_in_pieces(http: httpx.AsyncClient) -> None:
    """As a stream of unknown length, both ways."""
    path = await make(http)

    async def pieces():
        for number in range(64):
            yield bytes([number]) * 2**18

    assert (await http.put(f"{path}/file", params={"path": "big"}, content=pieces())).json() == {
        "size": 2**24
    }
    size = 0
    async with http.stream("GET", f"{path}/file", params={"path": "big"}) as response:
        async for piece in response.aiter_raw():
            size += len(piece)
    assert size == 2**24


@pytest.mark.long
async def test_a_file_of_more_than_a_gibibyte_is_whole(http: httpx.AsyncClient) -> None:
    """Breaks when a limit that nobody asked for cuts it off, with a status that says that all is well."""
    path = await make(http)
    size = 2**30 + 10
    await run(http, path, f"truncate -s {size} holes")
    down = 0
    async with http.stream("GET", f"{path}/file", params={"path": "holes"}) as response:
        async for piece in response.aiter_raw():
            down += len(piece)
    assert down == size
    part = await http.get(f"{path}/file", params={"path": "holes", "offset": 2**30, "limit": 2**40})
    assert (part.status_code, len(part.content)) == (200, 10)


async def test_files_are_listed_searched_and_rearranged(http: httpx.AsyncClient) -> None:
    path = await make(http)
    for name in ("a.txt", "d/b.txt"):
        await http.put(f"{path}/file", params={"path": name}, content=f"needle in {name}\n".encode())
    listed = (await http.get(f"{path}/files")).json()
    assert sorted(entry["name"] for entry in listed["entries"]) == ["a.txt", "d"]
    assert not listed["truncated"]
    found = (await http.post(f"{path}/glob", json={"pattern": "**/*.txt"})).json()
    assert sorted(entry["name"] for entry in found["entries"]) == ["a.txt", "d/b.txt"]
    found = (await http.post(f"{path}/grep", json={"pattern": "needle in d"})).json()
    assert [(match["name"], match["line"]) for match in found["matches"]] == [("d/b.txt", 1)]
    assert (await http.post(f"{path}/mkdir", json={"path": "e/f"})).status_code == 204
    assert (await http.post(f"{path}/copy", json={"path": "a.txt", "to": "e/c.txt"})).status_code == 204
    assert (await http.post(f"{path}/move", json={"path": "a.txt", "to": "e/f/a.txt"})).status_code == 204
    assert (await http.delete(f"{path}/file", params={"path": "d"})).status_code == 422
    assert (await http.delete(f"{path}/file", params={"path": "d", "recursive": 1})).status_code == 204
    assert (await run(http, path, "find . -type f | sort"))["stdout"] == "./e/c.txt\n./e/f/a.txt\n"


async def test_what_is_not_there_and_what_may_not_be_asked_for(http: httpx.AsyncClient) -> None:
    """404 and 422 that name it; paths stay in the writable folders."""
    path = await make(http)
    missing = await http.get(f"{path}/file", params={"path": "none"})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    outside = await http.get(f"{path}/file", params={"path": "/etc/passwd"})
    assert outside.status_code == 422
    for params in ({}, {"path": ""}, {"path": "a\0"}, {"path": "a", "offset": "x"}):
        refused = await http.get(f"{path}/file", params=params)
        assert refused.status_code == 422
        assert refused.json()["detail"].startswith(("path", "offset"))


async def test_a_file_that_is_too_large_is_refused_while_it_comes(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Announced or not; the old file stays. Breaks when only the announced length counts."""
    path = await make(http)
    await http.put(f"{path}/file", params={"path": "f"}, content=b"old")
    settings = make_settings(**fleet.settings, max_file_bytes=1024)

    async def pieces():
        for _ in range(20):
            yield b"x" * 200

    headers = {"x-api-key": fleet.alice}
    async with (
        serve(create_app(settings)) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as small,
    ):
        for content in (b"x" * 4000, pieces()):
            refused = await small.put(f"{path}/file", params={"path": "f"}, content=content)
            assert refused.status_code == 413, refused.text
    assert (await http.get(f"{path}/file", params={"path": "f"})).content == b"old"
