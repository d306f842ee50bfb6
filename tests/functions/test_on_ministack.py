"""The scheduled functions as AWS calls them: Lambda functions of an emulator, which invokes them by itself."""

import io
import json
import uuid
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from aiobotocore.session import get_session
from redis.asyncio import Redis

from sandfleet.localstack.ministack import start_ministack
from sandfleet.localstack.queues import create_queues
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.dead_letters import dead_letter_urls
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.submission import submit
from tests.fixtures_servers import open_supervisor
from tests.functions.test_functions import kill_permits
from tests.gates.test_gates import submission
from tests.waiting import eventually

REGION = "us-east-1"
ROLE = "arn:aws:iam::000000000000:role/any"
LEASE_S = 4.0
PATIENCE_S = 150  # a schedule comes once a minute, on a machine that is busy


@dataclass
class Cloud:
    """An account of the emulator, with sandfleet's queues and functions, and the database that they work on."""

    endpoint: str
    queue_urls: dict[str, str]
    env: dict[str, str]
    connection: psycopg.AsyncConnection[Any]
    pool: Any
    deployed: list[str] = field(default_factory=list)

    def client(self, service: str) -> Any:
        return get_session().create_client(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    async def deploy(self, function: str) -> str:
        """A Lambda function of sandfleet's; its ARN. Its package is this installation: the emulator runs Python functions
        with its own interpreter."""
        package = io.BytesIO()
        with zipfile.ZipFile(package, "w") as archive:
            archive.writestr("index.py", f"from sandfleet.functions.{function}.handler import handler\n")
        async with self.client("lambda") as aws:
            made = await aws.create_function(
                FunctionName=f"{function}-{uuid.uuid4().hex[:8]}",
                Runtime="python3.11",
                Role=ROLE,
                Handler="index.handler",
                Code={"ZipFile": package.getvalue()},
                Timeout=60,
                MemorySize=256,
                Environment={"Variables": self.env},
            )
        self.deployed.append(made["FunctionArn"])
        return str(made["FunctionArn"])

    async def remove_functions(self) -> None:
        """And the processes that the emulator keeps warm for them."""
        async with self.client("lambda") as aws:
            for arn in self.deployed:
                await aws.delete_function(FunctionName=arn)


@pytest.fixture(scope="module")
async def emulator() -> AsyncIterator[str]:
    """Endpoint of an emulator that has Lambda and EventBridge, too."""
    supervisor = await open_supervisor("lambda")

    async def nothing(_: str) -> None: ...

    try:
        yield await start_ministack(supervisor, REGION, nothing, "sqs,lambda,events,iam,logs,sts")
    finally:
        await supervisor.close()


@pytest.fixture
async def cloud(emulator: str, database: str, redis_url: str) -> AsyncIterator[Cloud]:
    urls = await create_queues(emulator, REGION, {}, ("default",), f"test-{uuid.uuid4().hex[:8]}")
    env = {
        "SANDFLEET_DATABASE_URL": database,
        "SANDFLEET_REDIS_URL": redis_url,
        "SANDFLEET_AWS_ENDPOINT_URL": emulator,
        "SANDFLEET_QUEUE_URLS": json.dumps(urls),
        "SANDFLEET_LEASE_S": str(LEASE_S),
        "SANDFLEET_RENEW_EVERY_S": "1",
        "SANDFLEET_SWEEP_EVERY_S": "0.5",
    }
    async with (
        open_pool(database, 2) as pool,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
    ):
        await connection.execute(
            "truncate runs, threads, journal, tenants, api_keys, executors, pulse cascade"
        )
        await connection.execute("update turns set due_at = default")
        await create_key(connection, Owner("a", "u"), "test")
        made = Cloud(emulator, urls, env, connection, pool)
        yield made
        await made.remove_functions()


@pytest.fixture
async def permits(cloud: Cloud) -> AsyncIterator[Permits]:
    permits = Permits(Settings(aws_endpoint_url=cloud.endpoint, queue_urls=cloud.queue_urls))
    yield permits
    await permits.aclose()


async def lost_run(cloud: Cloud) -> None:
    """A run whose executor has died, and no other executor anywhere."""
    await submit(cloud.pool, submission("a", new_id()))
    assert await claim(cloud.connection, "default", "dead", -1, 1, longest_waiting=False)


async def returned(cloud: Cloud) -> bool:
    rows = await (await cloud.connection.execute("select status, deaths from runs")).fetchall()
    return rows == [("pending", 1)]


async def woken(cloud: Cloud, permits: Permits) -> None:
    """A permit and a ring wait for the next executor."""
    await eventually(lambda: permits.visible("default"), 60, "a permit")
    async with Redis.from_url(cloud.env["SANDFLEET_REDIS_URL"]) as redis:
        assert await redis.llen("sf:ring:default") == 1


async def test_the_sweeper_alone_returns_what_a_dead_fleet_has_left(cloud: Cloud, permits: Permits) -> None:
    """No executor is alive. Red when the function leans on one, or tells nobody of the run."""
    await lost_run(cloud)
    arn = await cloud.deploy("sweeper")
    async with cloud.client("lambda") as aws:
        answer = await aws.invoke(FunctionName=arn, Payload=b"{}")
        said = json.loads(await answer["Payload"].read())
    assert "FunctionError" not in answer, said
    assert said["ready"] == 1
    assert await returned(cloud)
    await woken(cloud, permits)


@pytest.mark.long
async def test_a_schedule_calls_the_sweeper(cloud: Cloud, permits: Permits) -> None:
    """As it is deployed: once a minute."""
    await lost_run(cloud)
    arn = await cloud.deploy("sweeper")
    async with cloud.client("events") as aws:
        await aws.put_rule(Name="every-minute", ScheduleExpression="rate(1 minute)", State="ENABLED")
        await aws.put_targets(Rule="every-minute", Targets=[{"Id": "sweeper", "Arn": arn}])
        await eventually(lambda: returned(cloud), PATIENCE_S, "the run is returned")
        await aws.remove_targets(Rule="every-minute", Ids=["sweeper"])
        await aws.delete_rule(Name="every-minute")
    await woken(cloud, permits)


async def test_dead_permits_reach_their_function_by_themselves(cloud: Cloud, permits: Permits) -> None:
    """By an event source mapping. Red when the function refuses the event that Lambda makes of messages: they would come
    back for ever. The dead-letter queue is empty afterwards, and ready runs have their permits."""
    for _ in range(2):
        await submit(cloud.pool, submission("a", new_id()))
    queue = await kill_permits(permits, 3)
    assert queue == (await dead_letter_urls(permits))["default"]
    arn = await cloud.deploy("dead_letters")
    async with cloud.client("sqs") as sqs, cloud.client("lambda") as aws:
        attributes = await sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
        mapping = await aws.create_event_source_mapping(
            EventSourceArn=attributes["Attributes"]["QueueArn"], FunctionName=arn, BatchSize=10
        )

        async def gone() -> bool:
            names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            left = await sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)
            return set(left["Attributes"].values()) == {"0"}

        await eventually(gone, 90, "no dead permit is left")
        await aws.delete_event_source_mapping(UUID=mapping["UUID"])
    assert await permits.visible("default") == 2
