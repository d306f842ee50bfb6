"""The scheduled sweep and the consumer of dead letters as Lambda calls them, with real events from a real queue."""

import asyncio
import json
import os
import sys
import time

import psycopg
import pytest
from aiobotocore.session import get_session

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.dead_letters import dead_letter_urls
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.api_keys import create_key, find_owner
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.submission import submit
from tests.gates.test_gates import submission
from tests.localstack.test_commands import COMMAND
from tests.waiting import eventually

FORBIDDEN = {
    "langgraph",
    "langchain",
    "langchain_core",
    "docker",
    "aiodocker",
    "alembic",
    "sqlalchemy",
    "fastapi",
}
LEASE_S = 4.0


@pytest.fixture
async def queue_urls(servers):
    """Queues of each test's own: what one sends, another would count."""
    return await servers.create_queues()


@pytest.fixture
async def deployment(database, redis_url, queue_urls, servers):
    """Settings of a new deployment, a connection, and a pool of connections."""
    pool = open_pool(database, 2)
    await pool.open()
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "truncate runs, threads, journal, tenants, api_keys, executors, pulse cascade"
        )
        await connection.execute("update turns set due_at = '-infinity'")
        await create_key(connection, Owner("a", "u"), "test")
        env = {
            "SANDFLEET_DATABASE_URL": database,
            "SANDFLEET_REDIS_URL": redis_url,
            "SANDFLEET_AWS_ENDPOINT_URL": servers.aws_endpoint_url,
            "SANDFLEET_QUEUE_URLS": json.dumps(queue_urls),
            "SANDFLEET_LEASE_S": str(LEASE_S),
            "SANDFLEET_RENEW_EVERY_S": "1",
            "SANDFLEET_SWEEP_EVERY_S": "0.2",
        }
        yield env, connection, pool
    await pool.close()


@pytest.fixture
async def permits(servers, queue_urls):
    permits = Permits(Settings(aws_endpoint_url=servers.aws_endpoint_url, queue_urls=queue_urls))
    yield permits
    await permits.aclose()


async def invoke(env, function, event):
    """Call a function in a process of its own; returns its answer, what it logged and the modules of its cold start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.functions.invoke", f"sandfleet.functions.{function}.handler"),
        env={k: v for k, v in os.environ.items() if not k.endswith("DATABASE_URL")} | env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate(json.dumps(event).encode())
    assert process.returncode == 0, output.decode()
    *logs, last = [json.loads(line) for line in output.decode().splitlines()]
    return last["answer"], logs, set(last["loaded"])


def metric(logs, name):
    """The value of an EMF metric among the log lines."""
    (value,) = [line[name] for line in logs if "_aws" in line and name in line]
    return value[0] if isinstance(value, list) else value


async def test_the_scheduled_sweep_returns_the_runs_of_a_dead_fleet(deployment):
    """It goes on for a lease, because leases expire only while sweeps come without a pause. Red when it makes one pass."""
    env, connection, pool = deployment
    await submit(pool, submission("a", new_id()))
    await claim(connection, "default", "dead", -1, 1, longest_waiting=False)
    answer, logs, loaded = await invoke(env, "sweeper", {"source": "aws.events"})
    assert answer["ready"] == 1
    assert answer["passes"] > 2
    assert (metric(logs, "RunsMadeReady"), metric(logs, "SweepPasses")) == (1, answer["passes"])
    assert await (await connection.execute("select status, deaths from runs")).fetchall() == [("pending", 1)]
    assert loaded & FORBIDDEN == set()


async def test_the_scheduled_sweep_leaves_the_turns_to_executors(deployment):
    """Red when it sweeps beside a living fleet."""
    env, connection, _ = deployment
    await connection.execute("update turns set due_at = clock_timestamp() + interval '1 hour'")
    answer, logs, _ = await invoke(env, "sweeper", {})
    assert answer == {"passes": 0, "ready": 0}
    assert metric(logs, "SweepPasses") == 0


async def test_a_slow_start_of_the_client_costs_no_permit(permits, monkeypatch):
    """As in a cold Lambda on a busy machine. Red when loading the client counts as a call's time."""

    def slow():
        time.sleep(1.2)  # computation, which holds the loop
        return get_session()

    monkeypatch.setattr("aiobotocore.session.get_session", slow)
    await permits.send("default", 1)
    assert await permits.visible("default") == 1


async def kill_permits(permits, count):
    """Let executors take permits and die, as often as it takes; returns the messages that are in the dead-letter queue."""
    sqs, url = await permits.client(), permits.url("default")
    await permits.send("default", count)
    dead = (await dead_letter_urls(permits))["default"]

    async def all_dead():
        await sqs.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, VisibilityTimeout=0, WaitTimeSeconds=0
        )
        answer = await sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["ApproximateNumberOfMessages"])
        return int(answer["Attributes"]["ApproximateNumberOfMessages"]) == count

    await eventually(all_dead, 60, "dead permits")
    return dead


def record(message, queue):
    """A message as Lambda's event source hands it on."""
    return {
        "messageId": message["MessageId"],
        "receiptHandle": message["ReceiptHandle"],
        "body": message["Body"],
        "attributes": message["Attributes"],
        "messageAttributes": {},
        "md5OfBody": message["MD5OfBody"],
        "eventSource": "aws:sqs",
        "eventSourceARN": f"arn:aws:sqs:us-east-1:000000000000:{queue.rsplit('/', 1)[1]}",
        "awsRegion": "us-east-1",
    }


@pytest.mark.emulators
async def test_dead_permits_are_reported_and_replaced_by_as_many_as_ready_runs_need(deployment, permits):
    """Red when a dead permit is not counted, its pool is not looked at, or more are sent anew than runs are ready."""
    env, _, pool = deployment
    queue = await kill_permits(permits, 3)
    sqs = await permits.client()
    answer = await sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, AttributeNames=["All"])
    event = {"Records": [record(message, queue) for message in answer["Messages"]]}
    assert len(event["Records"]) == 3
    for _ in range(2):
        await submit(pool, submission("a", new_id()))
    answer, logs, loaded = await invoke(env, "dead_letters", event)
    assert answer == {"default": 3}
    (line,) = [line for line in logs if "DeadPermits" in line]
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert directive["Dimensions"] == [["Deployment", "Pool"]]
    assert (line["Deployment"], line["Pool"], line["DeadPermits"]) == ("sandfleet", "default", [3])
    assert len([line for line in logs if line.get("message") == "dead permit"]) == 3
    (said,) = [line for line in logs if "ready" in line]
    assert (said["pool"], said["ready"], said["sent_anew"], said["executors"]) == ("default", 2, 2, 0)
    assert await permits.visible("default") == 2
    assert loaded & FORBIDDEN == set()
    for message in event["Records"]:
        await sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["receiptHandle"])
    await permits.delete("default", await permits.receive("default", 10, 1, 30))


@pytest.mark.emulators
async def test_the_command_lists_dead_permits_and_sends_them_anew(deployment, permits):
    """Red when a redriven permit stays in the dead-letter queue, or does not come back fresh."""
    env, _, _ = deployment
    await kill_permits(permits, 12)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "dead-letters", "--redrive", env={**os.environ, **env}, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    lines = output.decode().splitlines()
    assert len([line for line in lines if line.startswith("default ")]) == 12
    assert lines[-2].startswith("default: 0 ready runs")
    assert lines[-1] == "Sent 12 anew."
    assert await permits.visible("default") == 12
    queue = (await dead_letter_urls(permits))["default"]
    sqs = await permits.client()
    left = await sqs.get_queue_attributes(
        QueueUrl=queue,
        AttributeNames=["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"],
    )
    assert set(left["Attributes"].values()) == {"0"}
    fresh = await sqs.receive_message(
        QueueUrl=permits.url("default"), AttributeNames=["ApproximateReceiveCount"], MaxNumberOfMessages=1
    )
    assert fresh["Messages"][0]["Attributes"]["ApproximateReceiveCount"] == "1"


async def test_the_migration_makes_a_key_for_whoever_may_call_it(deployment):
    """A deployment's first one: nobody else is in the network. Red when it is not good, or can be read in the log."""
    env, connection, pool = deployment
    answer, logs, _ = await invoke(env, "migration", {"tenant": "new", "user": "ann"})
    assert await find_owner(pool, answer["api_key"]) == Owner("new", "ann")
    assert answer["api_key"] not in json.dumps(logs)
    cursor = await connection.execute("select count(*) from tenants where tenant = 'new'")
    assert await cursor.fetchone() == (1,)


@pytest.mark.parametrize("event", [{"tenant": "new"}, {"user": "ann"}, {"tenant": "new", "user": ""}])
async def test_a_key_needs_tenant_and_user(deployment, event):
    """Red when it is made for nobody, or the call is taken for a migration."""
    env, connection, _ = deployment
    with pytest.raises(AssertionError):  # the function fails
        await invoke(env, "migration", event)
    cursor = await connection.execute("select count(*) from api_keys where tenant = 'new'")
    assert await cursor.fetchone() == (0,)
