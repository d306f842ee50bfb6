"""The rules outside PostgreSQL, and the command, on real servers and a real engine."""

import asyncio
import json
import os

import httpx
import psycopg
import pytest
from redis.asyncio import Redis

from sandfleet.localstack import docker_api
from sandfleet.localstack.deployment_check import check_stack
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.process import free_port
from sandfleet.localstack.sandbox_leftovers import check_sandboxes
from sandfleet.shared.ids import new_id
from sandfleet.shared.invariants import queues
from sandfleet.shared.invariants.queues import check_queues
from sandfleet.shared.invariants.redis_keys import check_keys
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from tests.localstack.test_commands import COMMAND
from tests.waiting import eventually


async def command(stack, *options):
    """Exit code and output of ``sandfleet invariants`` on the stack."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "invariants",
        "--root",
        str(stack.root),
        *options,
        stdout=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "SANDFLEET_DATABASE_URL")},
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_stack_that_has_worked_breaks_no_rule(client, stack):
    """Red when a run, with its sandbox, leaves anything behind that a rule names."""
    await client.runs.wait(None, "counter", input={"steps": 3, "delay_ms": 1})

    async def clean():
        return (await check_stack(stack.info)).violations == []

    await eventually(clean, 60, "no violation")
    code, output = await command(stack)
    assert (code, "All invariants hold" in output) == (0, True)


async def test_the_command_names_what_is_broken_and_fails(client, stack):
    """Red when the command ends with 0, or does not name the offender."""
    async with Redis.from_url(stack.info.redis_url) as redis:
        await redis.set("sf:forgotten", "secret")
        try:
            code, output = await command(stack, "--json", "--all")
        finally:
            await redis.delete("sf:forgotten")
    report = json.loads(output)
    assert (code, report["ok"]) == (1, False)
    assert "sf:forgotten" in [violation["id"] for violation in report["violations"]]
    assert "secret" not in output


@pytest.mark.parametrize(
    ("variable", "named", "checked"),
    [
        ("DATABASE_URL", "PostgreSQL", "Redis key without a time to live"),
        ("REDIS_URL", "Redis", "tenant's counters"),
        ("AWS_ENDPOINT_URL", "SQS", "Redis key without a time to live"),
        ("DOCKER_HOST", "The Docker Engine", "Redis key without a time to live"),
    ],
)
async def test_a_part_that_is_away_is_named_and_the_others_are_checked(
    variable, named, checked, servers, engine, database, redis_url, queue_urls
):
    """Red when the command ends with a traceback, with 0, or as if it had found nothing but violations."""
    env = {
        **os.environ,
        "DATABASE_URL": database,
        "REDIS_URL": redis_url,
        "AWS_ENDPOINT_URL": servers.aws_endpoint_url,
        "SANDFLEET_QUEUE_URLS": json.dumps(queue_urls),
        "DOCKER_HOST": engine,
    }
    port = free_port()
    scheme, _, rest = env[variable].partition("://")
    path = f"/{rest.partition('/')[2]}" if scheme != "unix" else ""
    env[variable] = f"{'http' if scheme == 'unix' else scheme}://127.0.0.1:{port}{path}"
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
        Redis.from_url(redis_url) as redis,
    ):
        await connection.execute(
            "insert into tenants (tenant, max_in_flight, max_queued, slots) values ('x', 1, 1, 1)"
            " on conflict do nothing"
        )
        await redis.set("sf:forgotten", "1")
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                "invariants",
                env=env,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, errors = await process.communicate()
        finally:
            await redis.flushdb()
    said = errors.decode().splitlines()
    assert (process.returncode, len(said)) == (2, 1), errors.decode()
    assert said[0].startswith(f"Error: {named} does not answer")
    assert checked in output.decode()


async def test_wrong_settings_are_named(database):
    """Red when they show as a traceback, or as something that is broken in the deployment."""
    env = {**os.environ, "DATABASE_URL": database, "SANDFLEET_LEASE_S": "2"}
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "invariants", env=env, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith("Error: SANDFLEET_RENEW_EVERY_S is 5 and must be at most a third")


async def test_a_redis_key_without_a_time_to_live_is_named(redis_url):
    """Red when keys are not asked for their time to live; one that gets it late is fine."""
    async with Redis.from_url(redis_url) as redis:
        await redis.set("sf:run:ok", "1", ex=60)
        await redis.set("sf:run:immortal", "1")
        await redis.set("sf:run:late", "1")
        await redis.set("other", "not ours")
        asyncio.get_running_loop().call_later(
            0.3, lambda: asyncio.ensure_future(redis.expire("sf:run:late", 60))
        )
        try:
            found, count = await check_keys(redis)
        finally:
            await redis.flushdb()
    assert ([violation.id for violation in found], count) == (["sf:run:immortal"], 3)


@pytest.mark.emulators
async def test_permits_far_above_the_ready_runs_are_named(servers, queue_urls, monkeypatch):
    """Red when the permits of a queue are not held against the runs that they stand for."""
    monkeypatch.setattr(queues, "SURPLUS", 10)
    permits = Permits(Settings(aws_endpoint_url=servers.aws_endpoint_url, queue_urls=queue_urls))
    try:
        await permits.send("default", 15)
        assert (await check_queues(permits, {"default": 5})) == ([], 15)
        found, _ = await check_queues(permits, {"default": 4})
        assert [violation.id for violation in found] == ["default"]
    finally:
        await permits.aclose()


@pytest.fixture
async def container(stack):
    """Make a container that looks like the sandbox of a run; returns its name. Removed afterwards."""
    made = []
    transport = httpx.AsyncHTTPTransport(uds=stack.info.docker_host.removeprefix("unix://"))
    async with httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=60) as engine:

        async def make(run_id):
            name = f"sandfleet-test-{new_id().hex}-run-{run_id}"
            # Not the stack's own label: its host would remove what it does not know.
            labels = {LABEL: "seeded"}
            body = {"Image": "sandfleet-sandbox:latest", "Labels": labels, "NetworkDisabled": True}
            (await engine.post("/containers/create", params={"name": name}, json=body)).raise_for_status()
            made.append(name)
            return name

        yield make
        for name in made:
            await engine.delete(f"/containers/{name}", params={"force": "true"})


async def test_the_sandbox_of_an_ended_run_is_named(client, stack, container, monkeypatch):
    """Red when containers are not held against their runs; one whose run is live or just over is fine."""
    monkeypatch.setattr("sandfleet.localstack.sandbox_leftovers.GONE_S", 30.0)
    thread = await client.threads.create()
    over = await client.runs.create(thread["thread_id"], "counter", input={"steps": 1, "delay_ms": 1})
    await client.runs.join(thread["thread_id"], over["run_id"])
    live = await client.runs.create(thread["thread_id"], "counter", input={"steps": 1}, after_seconds=3600)
    leftover = await container(over["run_id"])
    await container(live["run_id"])
    erased = await container(new_id())
    assert len(await asyncio.to_thread(docker_api.labelled, stack.info.docker_host, f"{LABEL}=seeded")) == 3
    async with await psycopg.AsyncConnection.connect(stack.info.database_url, autocommit=True) as connection:

        async def found():
            violations, count = await check_sandboxes(connection, stack.info.docker_host, f"{LABEL}=seeded")
            assert count == 3
            return {violation.id for violation in violations}

        assert await found() == set()
        monkeypatch.setattr("sandfleet.localstack.sandbox_leftovers.GONE_S", 0.0)
        assert await found() == {leftover, erased}
    await client.runs.cancel(thread["thread_id"], live["run_id"])
