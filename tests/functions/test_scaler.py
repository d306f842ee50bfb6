"""The scaler's reading and its calls of AWS: on a real database, real queues, and an emulator that keeps counts."""

import io
import json
import uuid
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from sandfleet.fleet.executor.registration import heartbeat
from sandfleet.functions.scaler.fleet import Clients, Group, Service
from sandfleet.localstack.ministack import start_ministack
from sandfleet.shared.db.pool import Pool, open_pool
from sandfleet.shared.errors import ScalingFailed
from sandfleet.shared.ids import Owner, new_id
from sandfleet.shared.scaling.decision import Memory
from sandfleet.shared.scaling.latencies import recent_latencies
from sandfleet.shared.scaling.load import busy_hosts, read_load, remember, retire, take_scaling_turn
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.submission import submit
from tests.fixtures_servers import open_supervisor
from tests.functions.test_functions import FORBIDDEN, invoke
from tests.gates.test_gates import submission
from tests.waiting import eventually

REGION = "us-east-1"


@pytest.fixture
async def connection(database: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "truncate runs, threads, journal, tenants, api_keys, executors, hosts, placements, scaling cascade"
        )
        await create_key(connection, Owner("a", "u"), "test")
        yield connection


@pytest.fixture
async def pool(database: str) -> AsyncIterator[Pool]:
    async with open_pool(database, 2) as pool:
        yield pool


async def beat(
    connection: Any, name: str, busy: int, host_id: str | None = None, *, draining: bool = False
) -> None:
    """A beat that lasts for the test, however slow the machine is."""
    await heartbeat(
        connection, name, "default", host_id, slots=16, busy=busy, loop_lag_ms=0, draining=draining
    )
    await connection.execute(
        "update executors set heartbeat_at = clock_timestamp() + interval '1 hour' where executor_id = %s",
        (name,),
    )


async def test_ready_runs_are_counted_and_their_age_is_the_databases(connection: Any, pool: Pool) -> None:
    """Red when the age is taken from a clock of ours, or from when the run was made."""
    for _ in range(3):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        "update runs set ready_at = ready_at - interval '40 s' where run_id = (select run_id from runs limit 1)"
    )
    load = await read_load(connection, "default")
    assert load.ready == 3
    assert 40 <= load.oldest_s < 70
    assert (await read_load(connection, "hosts")).ready == 0


async def test_capped_delayed_and_thread_busy_runs_scale_nothing_out(connection: Any, pool: Pool) -> None:
    """However many and old they are. Red when pending runs are counted instead of ready ones."""
    await connection.execute("update tenants set max_in_flight = 1")
    thread = new_id()
    await submit(pool, submission("a", thread))
    await claim(connection, "default", "e", 60, 1, longest_waiting=False)
    await submit(pool, submission("a", thread))  # its thread is busy
    await submit(pool, submission("a", new_id()))  # its tenant has no slot left
    await submit(pool, submission("a", new_id(), delay_s=3600.0))
    await connection.execute("update runs set created_at = created_at - interval '1 day'")
    gates = await (await connection.execute("select gate from runs where status = 'pending'")).fetchall()
    assert {gate for (gate,) in gates} == {"thread", "tenant", "time"}
    load = await read_load(connection, "default")
    assert (load.ready, load.oldest_s) == (0, 0.0)


async def test_executors_count_while_they_beat(connection: Any) -> None:
    """Red when one that has died counts as a free one."""
    await beat(connection, "busy", 3)
    await beat(connection, "idle", 0)
    await beat(connection, "dead", 0)
    await connection.execute(
        "update executors set heartbeat_at = heartbeat_at - interval '2 hours' where executor_id = 'dead'"
    )
    load = await read_load(connection, "default")
    assert (load.executors, load.idle, load.slots, load.busy) == (2, 1, 32, 3)


async def test_one_that_drains_is_no_more_counted_nor_kept_instead_of_another(connection: Any) -> None:
    """For as long as its runs last. Red when it counts while it beats: then there is one too many, and the new one, which
    has least to do, takes nothing until the old one has gone."""
    await beat(connection, "old", 3)
    await beat(connection, "old", 3, draining=True)
    await beat(connection, "new", 0)
    load = await read_load(connection, "default")
    assert (load.executors, load.idle, load.slots, load.busy) == (1, 1, 16, 0)
    await retire(connection, "default", load.executors - 1, 60)
    assert await retired(connection) == {"old"}
    await beat(connection, "old", 1, draining=True)
    await retire(connection, "default", 1, 60)
    await retire(connection, "default", 0, 60)
    assert await retired(connection) == {"old"}


async def test_a_host_is_not_idle_while_an_executor_drains_on_it(connection: Any) -> None:
    """Red when its runs are left out with its slots; one whose host takes nothing either does not count."""
    await host(connection, "i-1", 0, 0)
    await beat(connection, "old", 3, "i-1", draining=True)
    await beat(connection, "gone", 2, "i-2", draining=True)
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.executors, load.idle, load.slots, load.busy) == (1, 0, 0, 3)


async def test_the_duration_of_runs_is_that_of_the_last_ones(connection: Any, pool: Pool) -> None:
    """Red when it is not the pool's own, or counts the time of waiting."""
    assert (await read_load(connection, "default")).run_s is None
    for _ in range(2):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        """update runs set status = 'success', created_at = now() - interval '1 hour', started_at = now() - interval '20 s',
           finished_at = now() - interval '8 s'"""
    )
    assert (await read_load(connection, "default")).run_s == pytest.approx(12.0)
    assert (await read_load(connection, "hosts")).run_s is None


async def test_latencies_are_those_of_runs_that_ended_lately(connection: Any, pool: Pool) -> None:
    """Red when older ones count, another pool's, or when a stage that did not happen is taken for 0."""
    assert await recent_latencies(connection, "default") == {}
    for _ in range(4):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        """update runs set status = 'success', created_at = now() - interval '30 s', started_at = now() - interval '20 s',
             prepared_at = now() - interval '18 s', finished_at = now() - interval '10 s'
           where run_id in (select run_id from runs limit 3)"""
    )
    await connection.execute(
        "update runs set created_at = finished_at - interval '1 h', finished_at = now() - interval '2 h' "
        "where run_id = (select run_id from runs where finished_at is not null limit 1)"
    )
    found = await recent_latencies(connection, "default")
    assert found == pytest.approx(
        {
            "DispatchP50": 10,
            "DispatchP95": 10,
            "PreparationP50": 2,
            "PreparationP95": 2,
            "TotalP50": 20,
            "TotalP95": 20,
        }
    )
    assert await recent_latencies(connection, "hosts") == {}


async def host(connection: Any, name: str, sandboxes: int, taken: int) -> None:
    await connection.execute(
        """insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,
             pids_taken, draining) values (%s, 'i', 'unix:x', 'docker', 1, %s, 1000, 100, 10, %s, 0, false)""",
        (name, sandboxes, taken),
    )


async def test_a_host_is_idle_without_runs_and_sandboxes(connection: Any, pool: Pool) -> None:
    """Executors of one host are one. Red when each is counted, or a host whose sandboxes are used from elsewhere is taken
    for idle."""
    await host(connection, "i-runs", 0, 0)
    await host(connection, "i-sandboxes", 2, 500)
    await host(connection, "i-idle", 0, 0)
    for name, busy in (("i-runs", 1), ("i-runs", 0), ("i-idle", 0), ("i-idle", 0)):
        await beat(connection, uuid.uuid4().hex, busy, name)
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.executors, load.idle, load.slots, load.busy) == (3, 1, 64, 1)
    assert (load.hosts_taken, load.hosts_wanted) == (0.5, 0.0)
    assert await busy_hosts(connection) == {"i-runs", "i-sandboxes"}
    assert (await read_load(connection, "default")).executors == 4


async def test_runs_that_wait_for_room_ask_for_hosts(connection: Any, pool: Pool) -> None:
    """Red when they are left out, since they are not ready."""
    await host(connection, "i-full", 2, 1000)
    await submit(pool, submission("a", new_id()))
    await connection.execute("update runs set gate = 'room'")
    await connection.execute(
        """insert into placements (tenant, user_id, run_id, template, memory, pids, placed_at)
           select tenant, user_id, run_id, 'default', 250, 1, clock_timestamp() - interval '30 s' from runs"""
    )
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.ready, load.hosts_taken, load.hosts_wanted) == (0, 1.0, 0.25)
    assert 30 <= load.room_wait_s < 60


async def test_one_decides_at_a_time_and_the_next_knows_what_it_left(connection: Any) -> None:
    """Red when two calls of the function decide upon the same load, or a decision forgets."""
    assert await take_scaling_turn(connection, "default", 60) == Memory()
    assert await take_scaling_turn(connection, "default", 60) is None
    assert await take_scaling_turn(connection, "hosts", 60) == Memory()
    left = Memory(out_at_s=1.5, low_since_s=2.5, low_peak=3)
    await remember(connection, "default", left)
    await connection.execute("update scaling set due_at = '-infinity'")
    assert await take_scaling_turn(connection, "default", 60) == left


async def retired(connection: Any) -> set[str]:
    cursor = await connection.execute(
        "select executor_id from executors where retiring_until > clock_timestamp()"
    )
    return {name for (name,) in await cursor.fetchall()}


async def test_those_with_least_to_do_retire_and_stay_retired(connection: Any) -> None:
    """They end what they have and become idle. Red when others are chosen the next time, when it is never taken back, or
    when the executor does not hear of it."""
    for name, busy in (("a", 5), ("b", 1), ("c", 9)):
        await beat(connection, name, busy)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"b"}
    await heartbeat(connection, "a", "default", None, slots=16, busy=0, loop_lag_ms=0)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"b"}
    beats = {
        name: await heartbeat(connection, name, "default", None, slots=16, busy=1, loop_lag_ms=0)
        for name in "abc"
    }
    assert beats == {"a": False, "b": True, "c": False}
    await retire(connection, "default", 0, 60)
    assert await retired(connection) == set()


async def test_nobody_stays_retired_without_a_scaler(connection: Any) -> None:
    """Red when a scaler that died leaves executors that take nothing."""
    await beat(connection, "a", 0)
    await retire(connection, "default", 1, -1)
    assert await heartbeat(connection, "a", "default", None, slots=16, busy=0, loop_lag_ms=0) is False


async def test_a_host_retires_as_a_whole(connection: Any) -> None:
    """Red when an executor of it goes on taking runs: the host would never be idle."""
    for name, busy, host_id in (("a", 0, "i-1"), ("b", 9, "i-1"), ("c", 2, "i-2"), ("d", 2, "i-2")):
        await beat(connection, name, busy, host_id)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"c", "d"}


# --- AWS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def emulator() -> AsyncIterator[str]:
    """Endpoint of an emulator that has ECS and Auto Scaling, too."""
    supervisor = await open_supervisor("scaler")

    async def nothing(_: str) -> None: ...

    try:
        yield await start_ministack(
            supervisor, REGION, nothing, "sqs,ecs,autoscaling,monitoring,lambda,sns,iam,logs,sts,ec2"
        )
    finally:
        await supervisor.close()


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


async def test_the_figures_are_published_with_the_pool_as_their_one_dimension(
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
    )
    answer, logs, loaded = await invoke(env, "scaler", {"source": "aws.events"})
    assert answer == {}
    (line,) = emf(logs)
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert (directive["Namespace"], directive["Dimensions"]) == ("sandfleet", [["Pool"]])
    assert {metric["StorageResolution"] for metric in directive["Metrics"]} == {1}
    assert line["Pool"] == "default"
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
    """Old and new are more than were asked for, and the new one has least to do. Red when it is retired as one too many:
    nothing would start before the old one has gone."""
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
    await beat(connection, "old", 3)
    await beat(connection, "new", 0)
    assert not await fleet.is_replacing()
    stuck = {"maximumPercent": 100, "minimumHealthyPercent": 100}  # the emulator is done with others at once
    await ecs.update_service(
        cluster=name, service=name, forceNewDeployment=True, deploymentConfiguration=stuck
    )
    assert await fleet.is_replacing()
    await invoke(env, "scaler", {})
    assert await retired(connection) == set()
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
        await cloudwatch.put_metric_alarm(
            AlarmName=name,
            Namespace="sandfleet",
            MetricName="OldestReadyAge",
            Dimensions=[{"Name": "Pool", "Value": "default"}],
            Statistic="Maximum",
            Period=1,
            EvaluationPeriods=1,
            Threshold=5,
            ComparisonOperator="GreaterThanOrEqualToThreshold",
            AlarmActions=[topic],
            OKActions=[topic],
        )

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
