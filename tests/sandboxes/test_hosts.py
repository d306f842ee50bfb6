"""Sandboxes without a run, when their host restarts or goes."""

import json
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fixtures_servers import TestServers
from tests.sandbox.conftest import check_empty
from tests.sandbox.host_process import Host
from tests.sandboxes.calls import make, run
from tests.sandboxes.conftest import Fleet, open_fleet
from tests.waiting import eventually


@pytest.fixture
async def fleet(servers: TestServers, engine: str) -> AsyncIterator[Fleet]:
    """For one test: it stops the host."""
    async with open_fleet(servers, engine) as opened:
        yield opened


async def test_a_host_that_is_killed_costs_a_command_no_more_than_a_wait(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """The next host adopts the sandbox in its generation, and the command is followed to its end. Breaks when a broken
    connection is taken for the command's end."""
    path = await make(http)
    command = "echo one; until test -f go; do sleep 0.1; done; echo two"
    output = ""
    async with http.stream("POST", f"{path}/exec/stream", json={"command": command}) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if "one" in line:
                break
        await fleet.host.kill()
        await fleet.host.start()
        sent = await http.put(f"{path}/file", params={"path": "go"}, content=b"")
        assert sent.status_code == 200, sent.text
        async for line in lines:
            if line.startswith("data: "):
                output += json.loads(line.removeprefix("data: ")).get("data", "")
    assert output == "two\n"
    assert (await http.get(path)).json()["generation"] == 1


async def test_a_sandbox_goes_on_elsewhere_with_its_files_when_its_host_stops(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """On a host that is reached by TCP; one call says so. Breaks when the loss of a host is not a loss of its sandboxes, or
    when a sandbox that nobody asked to keep is not kept by the host that stops."""
    path = await make(http)
    await run(http, path, "echo kept > file")
    env = {**fleet.host.env, "SANDFLEET_HOST_LISTEN": "127.0.0.1:0", "SANDFLEET_HOST_ID": "elsewhere"}
    other = Host(
        fleet.host.folder / "other",
        fleet.host.database_url,
        "docker",
        fleet.host.docker_host,
        env,
        secret=fleet.host.secret,
    )
    await other.start()
    try:
        assert await fleet.host.stop() == 0

        async def told() -> httpx.Response | None:
            answer = await http.post(f"{path}/exec", json={"command": "true"})
            assert answer.status_code in (410, 503), answer.text
            return answer if answer.status_code == 410 else None

        lost = (await eventually(told, what="the loss is told")).json()
        assert lost["restored"] is not None
        (kept,) = (await http.get(f"{path}/snapshots")).json()
        assert (kept["snapshot_id"], kept["reason"]) == (lost["restored"], "drain")
        assert (await run(http, path, "cat file"))["stdout"] == "kept\n"
        assert (await other.health())["sandboxes"] == 1
        await http.delete(path)
        await check_empty(other)
    finally:
        assert await other.stop() == 0
        await fleet.host.start()


async def test_a_sandbox_that_cannot_begin_with_its_snapshot_is_not_made(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Here on a host that keeps none. Red when its caller, who has none yet, is told of a loss: who forks would take it for that
    of the sandbox that was forked."""
    path = await make(http)
    kept = (await http.post(f"{path}/snapshots")).json()["snapshot_id"]
    env = {"SANDFLEET_HOST_LISTEN": "127.0.0.1:0", "SANDFLEET_HOST_ID": "keeps-none"}
    folder, database, engine = fleet.host.folder / "other", fleet.host.database_url, fleet.host.docker_host
    other = Host(folder, database, "docker", engine, env, secret=fleet.host.secret)
    await fleet.host.stop()
    await other.start()
    try:

        async def refused() -> httpx.Response | None:
            answer = await http.post("/sandboxes", json={"snapshot_id": kept})
            assert answer.status_code in (404, 503), answer.text
            return answer if answer.status_code == 404 else None

        answer = await eventually(refused, what="the refusal")
        assert "keeps none" in answer.json()["detail"]
        assert await fleet.sql("select count(*) from sandboxes") == [(1,)]
    finally:
        assert await other.stop() == 0
        await fleet.host.start()


async def test_a_key_whose_sandbox_could_not_be_made_makes_another(
    fleet: Fleet, http: httpx.AsyncClient
) -> None:
    """Red when the key outlives the sandbox that is taken back."""
    headers = {"idempotency-key": uuid.uuid4().hex}
    assert await fleet.host.stop() == 0
    try:  # with one that PostgreSQL takes for living
        await fleet.sql(
            """insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,
                 pids_taken, draining, templates, remote) values ('dead', 'dead', 'unix:/nowhere', 'docker', 1, 0, 1e12, 1e6, 9,
                 0, 0, false, '{"default": {"memory": 1, "pids": 1, "lifetime_s": 600}}', 'http://127.0.0.1:9')"""
        )
        failed = await http.post("/sandboxes", json={}, headers=headers)
        assert failed.status_code == 503, failed.text
        assert await fleet.sql("select count(*) from sandboxes") == [(0,)]
    finally:
        await fleet.sql("delete from hosts")
        await fleet.host.start()

    async def made() -> bool:
        """The API has just seen that its machine has no host, and believes it for a second."""
        answer = await http.post("/sandboxes", json={}, headers=headers)
        assert answer.status_code in (201, 503), answer.text
        return answer.status_code == 201

    await eventually(made, what="the sandbox")
