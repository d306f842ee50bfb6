"""The API as a process: it serves, says nothing on stdout, and goes away when told, letting its clients come back."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from tests.api.conftest import Api
from tests.waiting import eventually


@dataclass
class Process:
    """A started ``python -m sandfleet.functions.api``."""

    process: asyncio.subprocess.Process
    url: str


@pytest.fixture
async def process(api: Api) -> AsyncIterator[Process]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sandfleet.functions.api",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "DATABASE_URL": api.database_url,
            "REDIS_URL": api.redis_url,
            "SANDFLEET_API_PORT": str(port),
        },
    )
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        assert started.returncode is None
        async with httpx.AsyncClient() as http:
            try:
                return (await http.get(f"{url}/ok")).status_code == 200
            except httpx.TransportError:
                return False

    try:
        await eventually(answers, what="the API's answer")
        yield Process(started, url)
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_on_sigterm_it_lets_its_clients_go_and_exits_cleanly(api: Api, process: Process) -> None:
    """An open stream closes cleanly without `end`, a wait breaks, the exit code is 0, stdout stays empty, and every line
    of the log is JSON without an error in it."""
    async with httpx.AsyncClient(base_url=process.url, headers={"x-api-key": api.alice}) as http:
        body = {"assistant_id": "chat"}
        async with http.stream("POST", "/runs/stream", json=body) as stream:
            run_path = stream.headers["content-location"]
            async with http.stream("GET", f"{run_path}/join") as wait:
                process.process.send_signal(signal.SIGTERM)
                text = (await stream.aread()).decode()
                with pytest.raises(httpx.RemoteProtocolError):
                    await wait.aread()
    out, err = await asyncio.wait_for(process.process.communicate(), 30)
    assert "event: end" not in text
    assert process.process.returncode == 0
    assert out == b""
    lines = [json.loads(line) for line in err.splitlines()]
    assert [line for line in lines if line["level"] in ("ERROR", "CRITICAL")] == []
    assert api.alice.encode() not in err
