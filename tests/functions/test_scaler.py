"""The scaler's calls of AWS, alone and as a whole: on real queues and an emulator that keeps counts."""

import io
import json
import uuid
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from sandfleet.functions.scaler.figures import figures_of, publish
from sandfleet.functions.scaler.fleet import Clients, Group, Service
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.errors import ScalingFailed
from sandfleet.shared.ids import new_id
from sandfleet.shared.scaling.load import read_load
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.submission import submit
from tests.fixtures_emulators import REGION, emulator_with
from tests.fixtures_servers import TestServers
from tests.functions.beats import beat, retired
from tests.functions.test_functions import FORBIDDEN, invoke
from tests.gates.test_gates import submission
from tests.waiting import eventually


@pytest.fixture(scope="module")
async def emulator(servers: TestServers, pytestconfig: pytest.Config) -> AsyncIterator[str]:
    """Endpoint of an emulator that has ECS and Auto Scaling, too, for tests that are not marked `emulators`."""
    services = "sqs,ecs,autoscaling,monitoring,lambda,sns,iam,logs,sts,ec2"
    async with emulator_with(services, pytestconfig, servers) as endpoint:
        yield endpoint


@pytest.fixture
async def clients(emulator: str) -> AsyncIterator[Clients]:
    clients = Clients(Settings(aws_endpoint_url=emulator, aws_region=REGION))  # type: ignore[call-arg]
    yield clients
    await clients.aclose()


@pytest.fixture
async def service(clients: Clients) -> str:
    """A new ECS service without tasks, as CLUSTER/SERVICE."""
    name, ecs = f"s-{uuid.uuid4().hex[:8]}", await clients.of("ecs")
    await ecs.create_cluster(clusterName=name)
    await ecs.register_task_definition(
        family=name, containerDefinitions=[{"name": "executor", "image": "none", "memory": 16}]
    )
    await ecs.create_service(cluster=name, serviceName=name, taskDefinition=name, desiredCount=0)
    return f"{name}/{name}"


async def test_a_service_is_asked_for_tasks(clients: Clients, service: str) -> None:
    fleet = Service(await clients.of("ecs"), service)
    assert await fleet.desired() == 0
    await fleet.ask_for(3)
    assert await fleet.desired() == 3
    await fleet.ask_for(0)


async def test_a_target_that_is_not_there_is_named(clients: Clients) -> None:
    """Red when a wrong name shows as a KeyError, or as a pool without executors."""
    with pytest.raises(ScalingFailed, match="no ECS service no/where"):
        await Service(await clients.of("ecs"), "no/where").desired()
    with pytest.raises(ScalingFailed, match="no Auto Scaling group nowhere"):
        await Group(await clients.of("autoscaling"), "nowhere").desired()


def environment(database: str, redis_url: str, emulator: str, **more: str) -> dict[str, str]:
    return {
        "SANDFLEET_DATABASE_URL": database,
        "SANDFLEET_REDIS_URL": redis_url,
        "SANDFLEET_AWS_ENDPOINT_URL": emulator,
        "SANDFLEET_AWS_REGION": REGION,
        "SANDFLEET_SCALER_WINDOW_S": "0.1",
        **more,
    }


def emf(logs: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logs if "_aws" in line]


@pytest.mark.emulators
async def test_the_figures_are_published_with_deployment_and_pool_as_their_dimensions(
    connection: Any, pool: Pool, database: str, redis_url: str, emulator: str, clients: Clients
) -> None:
    """By the log for CloudWatch, and by a call for an emulator. Red when a variable of powertools adds a dimension, which
    would make them other metrics than the alarms watch."""
    await submit(pool, submission("a", new_id()))
    await beat(connection, "e", 3)
    env = environment(
        database,
        redis_url,
        emulator,
        SANDFLEET_QUEUE_URLS='{"default": "http://127.0.0.1:9/none"}',
        POWERTOOLS_SERVICE_NAME="other",
        SANDFLEET_DEPLOYMENT="acme",
    )
    answer, logs, loaded = await invoke(env, "scaler", {"source": "aws.events"})
    assert answer == {}
    (line,) = emf(logs)
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert (directive["Namespace"], directive["Dimensions"]) == ("sandfleet", [["Deployment", "Pool"]])
    assert {metric["StorageResolution"] for metric in directive["Metrics"]} == {1}
    assert (line["Deployment"], line["Pool"]) == ("acme", "default")
    assert line["OldestRoomWait"] == [0]  # also without one: an alarm watches it
    assert line["OldestWait"] == line["OldestReadyAge"]
    assert line["OldestReadyAge"][0] > 0
    found = {name: line[name] for name in ("ReadyRuns", "FreeSlots", "BusyExecutors", "Executors")}
    assert found == {"ReadyRuns": [1], "FreeSlots": [13], "BusyExecutors": [1], "Executors": [1]}
    assert line["BacklogPerSlot"] == [1 / 16]
    assert "VisiblePermits" not in line  # its queue does not answer, which holds nothing up
    metrics = await (await clients.of("cloudwatch")).list_metrics(Namespace="sandfleet")
    assert {m["MetricName"] for m in metrics["Metrics"]} >= {"OldestReadyAge", "BacklogPerSlot"}
    assert loaded & FORBIDDEN == set()


async def test_the_fast_path_goes_from_none_to_as_many_as_are_needed_and_back(
    connection: Any, pool: Pool, database: str, redis_url: str, emulator: str, clients: Clients, service: str
) -> None:
    """Several times in one call. Red when counts are not set, or the memory is not kept: then it never shrinks."""
    for _ in range(40):
        await submit(pool, submission("a", new_id()))
    target = {"service": service, "least": 0, "most": 9, "slots": 16}
    env = environment(
        database,
        redis_url,
        emulator,
        SANDFLEET_SCALER_TARGETS=json.dumps({"default": target}),
        SANDFLEET_SCALER_SETS_COUNTS="true",
        SANDFLEET_SCALER_EVERY_S="0.2",
        SANDFLEET_SCALER_WINDOW_S="1",
        SANDFLEET_SCALER_IN_AFTER_S="0.1",
        SANDFLEET_SCALER_RUN_S="60",
    )
    answer, logs, _ = await invoke(env, "scaler", {})
    assert answer == {"default": 3}
    assert len(emf(logs)) > 1
    assert len([line for line in logs if line.get("message") == "executors"]) == 1
    fleet = Service(await clients.of("ecs"), service)
    assert await fleet.desired() == 3
    await connection.execute("truncate runs cascade")
    for name in "abc":
        await beat(connection, name, 0)
    answer, _, _ = await invoke(env, "scaler", {})
    assert answer == {"default": 0}
    assert await fleet.desired() == 0


async def test_nobody_retires_while_a_service_replaces_its_tasks(
    connection: Any, database: str, redis_url: str, emulator: str, clients: Clients, service: str
) -> None:
    """Old and new are more than were asked for, and the new one has least to do. Red when it is retired as one too many, or
    when the old one goes on taking runs: under a steady load the replacement would never end."""
    ecs, name = await clients.of("ecs"), service.split("/")[0]
    target = {"service": service, "least": 1, "most": 3, "slots": 16}
    env = environment(
        database,
        redis_url,
        emulator,
        SANDFLEET_SCALER_TARGETS=json.dumps({"default": target}),
        SANDFLEET_SCALER_SETS_COUNTS="true",
        SANDFLEET_SCALER_EVERY_S="0.1",
    )
    fleet = Service(ecs, service)
    await fleet.ask_for(1)
    assert await fleet.newest_tasks() is None
    stuck = {"maximumPercent": 100, "minimumHealthyPercent": 100}  # the emulator is done with others at once
    await ecs.update_service(
        cluster=name, service=name, forceNewDeployment=True, deploymentConfiguration=stuck
    )
    deployments = (await ecs.describe_services(cluster=name, services=[name]))["services"][0]["deployments"]
    (newest,) = [d["id"] for d in deployments if d["status"] == "PRIMARY"]
    started = await ecs.run_task(cluster=name, taskDefinition=name, startedBy=newest)
    task = started["tasks"][0]["taskArn"].rpartition("/")[2]
    assert await fleet.newest_tasks() == {task}
    await beat(connection, "old", 3, task="another")
    await beat(connection, "new", 0, task=task)
    await invoke(env, "scaler", {})
    assert await retired(connection) == {"old"}
    await fleet.ask_for(0)


async def test_a_pool_that_fails_fails_the_call_and_not_the_other_pools(
    connection: Any, pool: Pool, database: str, redis_url: str, emulator: str, clients: Clients, service: str
) -> None:
    """So that the alarm on the function's errors sees it. Red when it is only logged, or ends the evaluation."""
    await submit(pool, submission("a", new_id()))
    targets = {"a-wrong-one": {"service": "no/where"}, "default": {"service": service}}
    env = environment(
        database,
        redis_url,
        emulator,
        SANDFLEET_SCALER_TARGETS=json.dumps(targets),
        SANDFLEET_SCALER_SETS_COUNTS="true",
    )
    with pytest.raises(AssertionError, match="a-wrong-one"):
        await invoke(env, "scaler", {})
    fleet = Service(await clients.of("ecs"), service)
    assert await fleet.desired() == 1
    await fleet.ask_for(0)


@pytest.mark.emulators
@pytest.mark.long
async def test_an_alarm_on_the_published_age_tells_its_topic_of_its_start_and_end(
    connection: Any, pool: Pool, emulator: str, clients: Clients
) -> None:
    """Red when the metric is published with another dimension than alarms watch: on LocalStack, since MiniStack's alarms look
    at none. The scaler's own publishing, and what it hears."""
    name = f"age-{uuid.uuid4().hex[:8]}"
    sqs, sns, cloudwatch = [await clients.of(service) for service in ("sqs", "sns", "cloudwatch")]
    queue = (await sqs.create_queue(QueueName=name))["QueueUrl"]
    of_queue = await sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
    topic = (await sns.create_topic(Name=name))["TopicArn"]
    await sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=of_queue["Attributes"]["QueueArn"])
    await put_age_alarm(cloudwatch, name, topic, 10)
    config = Settings(aws_endpoint_url=emulator, aws_region=REGION)  # type: ignore[call-arg]

    told: list[str] = []  # states

    async def last_told(state: str) -> bool:
        """A reading of the pool, until the topic has told of a state."""
        figures = figures_of(await read_load(connection, "default"), None, None, {})
        await publish(config, clients, "default", figures)
        answer = await sqs.receive_message(QueueUrl=queue, WaitTimeSeconds=1)
        for message in answer.get("Messages", ()):
            await sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            told.append(json.loads(json.loads(message["Body"])["Message"])["NewStateValue"])
        return told[-1:] == [state]

    await submit(pool, submission("a", new_id()))
    await connection.execute("update runs set ready_at = ready_at - interval '1 hour'")
    await eventually(lambda: last_told("ALARM"), 120, "the alarm's start")
    await connection.execute("truncate runs cascade")
    await eventually(lambda: last_told("OK"), 120, "the alarm's end")
    await cloudwatch.delete_alarms(AlarmNames=[name])


async def put_age_alarm(cloudwatch: Any, name: str, topic: str, period_s: int) -> None:
    """An alarm on the age of ready runs, as deployed but for its period."""
    await cloudwatch.put_metric_alarm(
        AlarmName=name,
        Namespace="sandfleet",
        MetricName="OldestReadyAge",
        Dimensions=[{"Name": "Deployment", "Value": "sandfleet"}, {"Name": "Pool", "Value": "default"}],
        Statistic="Maximum",
        Period=period_s,
        EvaluationPeriods=1,
        Threshold=5,
        ComparisonOperator="GreaterThanOrEqualToThreshold",
        AlarmActions=[topic],
        OKActions=[topic],
    )


async def test_an_alarm_on_the_age_brings_executors_and_takes_them_back(
    connection: Any, pool: Pool, database: str, redis_url: str, emulator: str, clients: Clients, service: str
) -> None:
    """As deployed, end to end on the emulator: the function publishes the age of ready runs, an alarm on it notifies a topic,
    the topic calls the function, and that asks ECS for three tasks; when nothing waits any more the alarm's end takes them
    back. Red when an alarm's notification is taken for a schedule's event, or the metric is not the one that alarms watch."""
    name = service.split("/")[0]
    target = {"service": service, "least": 1, "most": 3, "slots": 1}
    env = environment(
        database,
        redis_url,
        emulator,
        SANDFLEET_SCALER_TARGETS=json.dumps({"default": target}),
        SANDFLEET_SCALER_AGE_S="5",
        SANDFLEET_SCALER_RUN_S="60",
        SANDFLEET_SCALER_IN_AFTER_S="0",
        SANDFLEET_SCALER_PAUSE_S="0",
        SANDFLEET_SCALER_EVERY_S="0.1",
    )
    fleet = Service(await clients.of("ecs"), service)
    await fleet.ask_for(1)
    await beat(connection, "e", 1)
    sns, cloudwatch = await clients.of("sns"), await clients.of("cloudwatch")
    async with deployed(emulator, name, env) as function:
        topic = (await sns.create_topic(Name=name))["TopicArn"]
        await sns.subscribe(TopicArn=topic, Protocol="lambda", Endpoint=function.arn)
        await put_age_alarm(
            cloudwatch, name, topic, 1
        )  # less than CloudWatch takes, so that the test is quicker

        async def asked_for(count: int) -> bool:
            """A schedule's call, until the fleet is as it should be."""
            await function.call()
            return await fleet.desired() == count

        assert await asked_for(1)  # it publishes and asks for nothing
        for _ in range(2):
            await submit(pool, submission("a", new_id()))
        await connection.execute("update runs set ready_at = ready_at - interval '1 hour'")
        await eventually(lambda: asked_for(3), 120, "three tasks")
        await connection.execute("truncate runs cascade")
        for executor in "efg":
            await beat(connection, executor, 0)
        await eventually(lambda: asked_for(1), 120, "one task")
        await cloudwatch.delete_alarms(AlarmNames=[name])
        await sns.delete_topic(TopicArn=topic)
    await fleet.ask_for(0)


@dataclass
class Function:
    """The scaler as a function of the emulator, which runs it with its own interpreter."""

    arn: str
    aws: Any

    async def call(self) -> None:
        answer = await self.aws.invoke(FunctionName=self.arn, Payload=b"{}")
        said = await answer["Payload"].read()
        assert "FunctionError" not in answer, said


@asynccontextmanager
async def deployed(emulator: str, name: str, env: dict[str, str]) -> AsyncIterator[Function]:
    package = io.BytesIO()
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("index.py", "from sandfleet.functions.scaler.handler import handler\n")
    config = AioConfig(read_timeout=120, retries={"max_attempts": 0})
    async with get_session().create_client(
        "lambda",
        region_name=REGION,
        endpoint_url=emulator,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=config,
    ) as aws:
        made = await aws.create_function(
            FunctionName=name,
            Runtime="python3.11",
            Role="arn:aws:iam::000000000000:role/any",
            Handler="index.handler",
            Code={"ZipFile": package.getvalue()},
            Timeout=60,
            MemorySize=256,
            Environment={"Variables": env},
        )
        try:
            yield Function(made["FunctionArn"], aws)
        finally:
            await aws.delete_function(FunctionName=made["FunctionArn"])
