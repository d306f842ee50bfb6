"""Background processes of a sandbox, over the API: servers, and shells in a terminal."""

import asyncio
import base64

import httpx

from tests.sandboxes.calls import events, make
from tests.waiting import eventually


async def start(http: httpx.AsyncClient, path: str, command: str, **more: object) -> str:
    started = await http.post(f"{path}/processes", json={"command": command, **more})
    assert started.status_code == 201, started.text
    return f"{path}/processes/{started.json()['process']}"


async def test_a_process_outlives_its_request(http: httpx.AsyncClient) -> None:
    """Started, listed, read, written to, signalled, waited for, killed and forgotten."""
    path = await make(http)
    process = await start(http, path, "read line; echo got $line; sleep 600", stdin=True)
    listed = (await http.get(f"{path}/processes")).json()
    assert [(found["running"], found["stdin"]) for found in listed] == [(True, True)]
    assert (await http.put(f"{process}/stdin", content=b"it\n")).json() == {"size": 3}
    read = (await http.get(f"{process}/output", params={"wait_ms": 60_000})).json()
    assert (read["data"], read["running"], read["next_offset"]) == ("got it\n", True, 7)
    assert (await http.post(f"{process}/signal", json={"signal": 15})).status_code == 200
    ended = (await http.get(process, params={"wait_ms": 60_000})).json()
    assert (ended["running"], ended["signal"]) == (False, 15)
    assert (await http.delete(process)).status_code == 200
    missing = await http.get(process)
    assert (missing.status_code, missing.json()["code"]) == (404, "no_process")


async def test_output_is_streamed_and_goes_on_after_the_last_id(http: httpx.AsyncClient) -> None:
    """Ids are offsets: whoever comes back with one misses nothing and sees nothing twice."""
    path = await make(http)
    process = await start(http, path, "echo one; sleep 0.2; echo two; exit 4")
    async with http.stream("GET", f"{process}/output/stream") as response:
        found = await events(response)
    assert "".join(data["data"] for name, data, _ in found if name == "output") == "one\ntwo\n"
    assert found[-1] == ("exit", {"exit_code": 4, "signal": None}, "8")
    again = {"last-event-id": "4"}
    async with http.stream("GET", f"{process}/output/stream", headers=again) as response:
        found = await events(response)
    assert [data.get("data") for _, data, _ in found] == ["two\n", None]


async def test_a_shell_in_a_terminal(http: httpx.AsyncClient) -> None:
    """Its size can be changed, Ctrl-C goes inside, and its output is one stream."""
    path = await make(http)
    shell = await start(http, path, "exec sh -i", pty={"rows": 10, "columns": 33}, stdin=True, hold=True)
    seen = ""

    async def until(text: str) -> None:
        nonlocal seen
        async with asyncio.timeout(60), http.stream("GET", f"{shell}/output/stream") as response:
            seen = ""
            async for line in response.aiter_lines():
                seen += line
                if text in seen:
                    return

    await http.put(f"{shell}/stdin", content=b"stty size\n")
    await until("10 33")
    await http.post(f"{shell}/resize", json={"rows": 20, "columns": 44})
    await http.put(f"{shell}/stdin", content=b"stty size\n")
    await until("20 44")
    await http.put(f"{shell}/stdin", content=b"sleep 600; echo after $((1+1))\n")
    await until("sleep 600")
    await http.put(f"{shell}/stdin", content=b"\x03")
    await http.put(f"{shell}/stdin", content=b"echo code $?; exit 7\n")
    ended = (await http.get(shell, params={"wait_ms": 60_000})).json()
    assert ended["exit_code"] == 7


async def test_a_process_that_is_held_loses_no_output(http: httpx.AsyncClient) -> None:
    """4 MB through a ring of 256 KiB. Breaks when `hold` does not stop the agent's reading, and hangs when reading from an
    offset does not say that what is before it was taken."""
    path = await make(http)
    process = await start(http, path, "seq 1 600000", hold=True)

    async def is_held() -> bool:
        found = (await http.get(f"{process}/output", params={"limit": 1})).json()
        return found["running"] and found["next_offset"] == 1

    await eventually(is_held, what="output waits for its reader")
    async with http.stream("GET", f"{process}/output/stream", params={"encoding": "base64"}) as response:
        found = await events(response)
    output = b"".join(base64.b64decode(data["data"]) for name, data, _ in found if name == "output")
    assert output == b"".join(b"%d\n" % number for number in range(1, 600_001))
    assert sum(data.get("lost_bytes", 0) for _, data, _ in found) == 0
