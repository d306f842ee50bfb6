"""Commands in a sandbox, over the API."""

import asyncio
import base64

import httpx
import pytest

from sandfleet.functions.api.app import create_app
from tests.api.conftest import make_settings, serve
from tests.sandboxes.calls import events, make, run
from tests.sandboxes.conftest import Fleet
from tests.waiting import eventually


async def test_a_command_and_all_that_it_can_be_given(http: httpx.AsyncClient) -> None:
    """Arguments or a text for the shell, folder, variables, input; both outputs and the exit code."""
    path = await make(http)
    found = await run(
        http,
        path,
        ["sh", "-c", "pwd; echo $WHO; cat; echo oops >&2; exit 3"],
        cwd="/tmp",
        env={"WHO": "me"},
        stdin="in\n",
    )
    assert (found["stdout"], found["stderr"], found["exit_code"]) == ("/tmp\nme\nin\n", "oops\n", 3)
    assert (found["signal"], found["timed_out"], found["dropped_bytes"]) == (None, False, 0)
    raw = base64.b64encode(b"\xff\x00").decode()
    found = await run(http, path, "cat", stdin=raw, encoding="base64")
    assert found["stdout"] == raw
    assert (await run(http, path, "printf '\\377'"))["stdout"] == "\ufffd"
    assert (await run(http, path, "sleep 60", timeout_s=0.2))["timed_out"]


async def test_output_is_streamed_as_it_comes(http: httpx.AsyncClient) -> None:
    """`started`, pieces of both outputs, one `exit`; a character that is cut between pieces stays whole. Breaks when pieces
    are decoded one by one."""
    path = await make(http)
    script = "printf '\\303'; sleep 0.1; printf '\\244\\n'; sleep 0.1; echo oops >&2; exit 5"
    async with http.stream("POST", f"{path}/exec/stream", json={"command": script}) as response:
        found = await events(response)
    assert [name for name, _, _ in found] == ["started", "stdout", "stderr", "exit"]
    assert found[0][1] == {"generation": 1}
    assert found[1][1] == {"data": "ä\n"}
    assert found[3][1]["exit_code"] == 5


async def test_a_silent_command_is_heard_of_before_it_ends(http: httpx.AsyncClient) -> None:
    """Breaks when the host answers at the first output only: a proxy would cut the connection."""
    path = await make(http)
    async with http.stream("POST", f"{path}/exec/stream", json={"command": "sleep 600"}) as response:
        assert response.status_code == 200
        assert (await anext(response.aiter_lines())) == "event: started"


@pytest.mark.parametrize("way", ["exec", "exec/stream"])
async def test_who_hangs_up_kills_the_command(http: httpx.AsyncClient, way: str) -> None:
    """Breaks when nobody listens for the client's end: the command runs to its time limit."""
    path = await make(http)
    asking = asyncio.ensure_future(
        http.post(f"{path}/{way}", json={"command": "echo $$ > pid; exec sleep 600"})
    )

    async def pid() -> str:
        return (await run(http, path, "cat pid 2>/dev/null"))["stdout"].strip()

    number = await eventually(pid, what="the command runs")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def dead() -> bool:
        return (await run(http, path, f"test -d /proc/{number}"))["exit_code"] == 1

    await eventually(dead, what="the command is killed")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ({"command": []}, "command"),
        ({"command": "a\x00b"}, "command"),
        ({"command": "true", "timeout_s": 0}, "timeout_s"),
        ({"command": "true", "encoding": "latin-1"}, "encoding"),
        ({"command": "true", "stdin": "?", "encoding": "base64"}, "body: stdin"),
        ({"command": "true", "env": {"A": 1}}, "env"),
        ({"command": "true", "pty": {"rows": 0}}, "pty.rows"),
    ],
)
async def test_a_command_that_cannot_be_is_refused_by_its_field(
    fleet: Fleet, http: httpx.AsyncClient, body: dict[str, object], field: str
) -> None:
    """Before a sandbox is asked for: there is none here."""
    path = "/sandboxes/00000000-0000-7000-8000-000000000000"
    refused = await http.post(f"{path}/exec", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["detail"].startswith(field), refused.text


async def test_what_the_sandbox_refuses_is_told_with_its_code(http: httpx.AsyncClient) -> None:
    path = await make(http)
    refused = await http.post(f"{path}/exec", json={"command": "true", "cwd": "/workspace/none"})
    assert refused.status_code in (404, 422), refused.text
    assert "none" in refused.json()["detail"]
    assert (await run(http, path, "true"))["exit_code"] == 0


async def test_where_responses_end_early_a_command_cannot_take_longer(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """As on a Lambda: refused by its field, never cut off in the middle; the window is the limit of one that names none."""
    path = await make(http)
    settings = make_settings(**fleet.settings, response_window_s=1.0)
    headers = {"x-api-key": fleet.alice}
    async with (
        serve(create_app(settings)) as url,
        httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as window,
    ):
        refused = await window.post(f"{path}/exec", json={"command": "true", "timeout_s": 2})
        assert (refused.status_code, refused.json()["detail"][:10]) == (422, "timeout_s:")
        assert (await run(window, path, "sleep 600"))["timed_out"]
