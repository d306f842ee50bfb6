"""The templates on MiniStack: deployed as `sandfleet deploy-local` does, with executors and the gateway as containers, used
through its API Gateway and load balancer, updated, and removed. docs/deploy.md says what that proves.

All of it works on one deployment, and the last test removes it.
"""

import asyncio
import itertools
import json
import os
import shutil
import uuid
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
from langgraph_sdk import get_client

from sandfleet.localstack import docker_api
from sandfleet.localstack.local_deployment import Deployed, LocalDeployment
from sandfleet.localstack.servers import database_url
from sandfleet.localstack.supervisor import AlreadyRunning
from tests.fixtures_servers import ROOT
from tests.projects.basic.counter import expected_digest
from tests.waiting import eventually

# Images are built by the first test.
pytestmark = pytest.mark.timeout(1500)
BASIC = Path(__file__).parent.parent / "projects" / "basic"
GRAPHS = {name: f"./{name}.py:graph" for name in ("counter", "slow", "sandboxed")}
CONTEXT = {
    "size": "small",  # which may have three executors
    # An executor that was killed is missed sooner.
    "environment": {
        "SANDFLEET_LEASE_S": "5",
        "SANDFLEET_RENEW_EVERY_S": "1",
        "SANDFLEET_SWEEP_EVERY_S": "1",
    },
}
ENDED_S = 240


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """In place of the check after each test: the emulator keeps processes of functions, and their connections, until it ends
    with this module. What the deployment leaves behind, the last test looks for."""


@pytest.fixture(scope="module")
async def empty_database(servers):
    """URL of a database without a schema."""
    name = f"test_{uuid.uuid4().hex}"
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as connection:
        await connection.execute(f"create database {name}")
    url = database_url(servers.admin_url, name)
    yield url
    await servers.drop_database(url)


def make_project(folder, graphs):
    """A project with graphs of the basic one; returns its langgraph.json."""
    folder.mkdir()
    for file in {path.partition(":")[0] for path in graphs.values()}:
        shutil.copy(BASIC / file, folder)
    langgraph = folder / "langgraph.json"
    langgraph.write_text(json.dumps({"dependencies": ["."], "graphs": graphs}))
    return langgraph


@dataclass
class Ground:
    """A deployment, where it is, and a key for it."""

    deployment: LocalDeployment
    at: Deployed
    key: str

    def containers(self, part=None):
        """Names of the containers of its tasks that run; of one part, or all."""
        return docker_api.tasks(self.deployment.docker_host, self.deployment.supervisor.instance, part)

    def kill(self, container):
        with docker_api.engine_client(self.deployment.docker_host) as client:
            client.post(f"/containers/{container}/kill").raise_for_status()

    def http(self):
        return httpx.AsyncClient(trust_env=False, timeout=120, headers={"x-api-key": self.key})


@pytest.fixture(scope="module")
async def ground(servers, empty_database, redis_url, engine, tmp_path_factory):
    project = make_project(tmp_path_factory.mktemp("emulator") / "project", GRAPHS)
    env = {
        **os.environ,
        "DATABASE_URL": empty_database,
        "REDIS_URL": redis_url,
        "DOCKER_HOST": engine,
    }
    for number in itertools.count(1):
        deployment = LocalDeployment(
            ROOT / f"deployment-{number}", project, context=CONTEXT, env=env, say=print
        )
        try:
            at = await deployment.start()
            yield Ground(deployment, at, await deployment.make_key(at, "acme", "ann"))
        except AlreadyRunning:
            continue
        finally:
            forced = await deployment.stop()
        assert forced == []
        return


@pytest.fixture(scope="module")
async def sdk(ground):
    """`langgraph-sdk` at the URL that a deployment prints: API Gateway's. It knows the executor's graphs."""
    client = get_client(url=ground.at.url, api_key=ground.key)
    await eventually(lambda: client.assistants.search(graph_id="counter"), ENDED_S, "the executor's graphs")
    yield client
    await client.http.client.aclose()


async def ended(sdk, thread_id, run_id):
    """The status of a run after its end."""

    async def status():
        found = (await sdk.runs.get(thread_id, run_id))["status"]
        return found if found not in ("pending", "running") else None

    return await eventually(status, ENDED_S, "the run's end")


async def values_of(sdk, graph, values):
    """What a run makes of its input."""
    thread = await sdk.threads.create()
    run = await sdk.runs.create(thread["thread_id"], graph, input=values)
    assert await ended(sdk, thread["thread_id"], run["run_id"]) == "success"
    return (await sdk.threads.get_state(thread["thread_id"]))["values"]


async def test_the_schema_was_migrated_by_the_deployment(ground, empty_database):
    """Red when the custom resource does not call the function, or the function's package has no revisions."""
    async with await psycopg.AsyncConnection.connect(empty_database) as connection:
        (count,) = await (await connection.execute("select count(*) from alembic_version")).fetchone()
        assert count == 1
        await connection.execute("select 1 from runs")


async def test_a_request_reaches_the_packaged_lambda_on_every_kind_of_path(ground):
    """Red when API Gateway has no resource for one, or the package lacks what the handler imports."""
    url = ground.at.url
    async with ground.http() as http:
        assert (await http.get(f"{url}/ok")).json() == {"ok": True}
        assert (await http.post(f"{url}/threads/search", json={})).json() == []
        assert (await http.get(f"{url}/runs/{uuid.uuid4()}/timing")).status_code == 404
        path = f"threads/{uuid.uuid4()}/runs/{uuid.uuid4()}/tool_calls"
        assert (await http.get(f"{url}/{path}")).status_code == 404
        assert (await http.get(f"{url}/threads", headers={"x-api-key": "wrong"})).status_code == 401


async def test_a_run_uses_a_sandbox_of_the_host_from_an_executor_in_a_container(sdk, ground, empty_database):
    """API Gateway, Lambda, PostgreSQL, SQS, executor container, sandbox host, and back. Red when the container cannot reach
    one of them, or signs with another key than the host's."""
    values = await values_of(sdk, "sandboxed", {"commands": ["echo $((19 + 23)) > sum; cat sum"]})
    assert "42" in values["results"][0]
    async with await psycopg.AsyncConnection.connect(empty_database) as connection:
        rows = await (await connection.execute("select executor_id, host_id from executors")).fetchall()
    assert len(rows) == len(ground.containers("executor")) == 1


async def test_a_request_that_waits_goes_through_api_gateway_to_the_gateways_container(sdk, ground):
    """By the load balancer. Red when the integration names another address: then nobody answers; or when the Lambda answers,
    which never waits for long."""
    assert (await sdk.runs.wait(None, "counter", input={"steps": 3}))["digest"] == expected_digest(3)
    async with ground.http() as http:
        answer = await http.post(
            f"{ground.at.url}/runs/wait", json={"assistant_id": "counter", "input": {"steps": 1}}
        )
    assert answer.json()["digest"] == expected_digest(1)


async def events_of(ground, path, last_id=None):
    """(id, event, data) of a stream through the load balancer, as they come."""
    headers = {"last-event-id": last_id} if last_id else {}
    event = {}
    async with (
        ground.http() as http,
        http.stream("GET", f"{ground.at.stream_url}{path}", headers=headers) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
            elif "event" in event:
                yield event.get("id"), event["event"], json.loads(event.get("data") or "null")
                event = {}


async def test_a_stream_comes_through_the_load_balancer_and_goes_on_where_it_was_cut(sdk, ground):
    """From the gateway's container, while the run runs. Red when something on the way buffers: then nothing is there before
    the run's end; or when the gateway takes no notice of Last-Event-ID: it would go on with the newest event."""
    thread = await sdk.threads.create()
    thread_id = thread["thread_id"]
    run = await sdk.runs.create(
        thread_id, "slow", input={"seconds": 900}, stream_mode=["custom"], stream_resumable=True
    )
    path = f"/threads/{thread_id}/runs/{run['run_id']}/stream"

    async def ticks_from(last_id):
        """Five of them, and the id of the last."""
        found = []
        async with aclosing(events_of(ground, path, last_id)) as stream:
            async for event_id, event, data in stream:
                if event == "custom":
                    found.append(data["tick"])
                    if len(found) == 5:
                        return found, event_id
        raise AssertionError(f"the stream ended after {found}")

    first, last_id = await ticks_from(None)
    assert (await sdk.runs.get(thread_id, run["run_id"]))["status"] == "running"
    second, last_id = await ticks_from(last_id)
    assert first + second == list(range(first[0], first[0] + 10))
    await sdk.runs.cancel(thread_id, run["run_id"])
    events = [event async for _, event, _ in events_of(ground, path, last_id)]
    assert (events[0], events[-1]) == ("custom", "end")


@pytest.mark.long
async def test_a_killed_executor_is_replaced_and_its_run_goes_on(sdk, ground):
    """Red when the service does not replace the container, or when the other executor repeats a step."""
    thread = await sdk.threads.create()
    run = await sdk.runs.create(thread["thread_id"], "counter", input={"steps": 30, "delay_ms": 300})

    async def under_way():
        return len((await sdk.threads.get_state(thread["thread_id"]))["values"].get("done", [])) >= 3

    await eventually(under_way, ENDED_S, "its first steps")
    (killed,) = ground.containers("executor")
    ground.kill(killed)
    assert await ended(sdk, thread["thread_id"], run["run_id"]) == "success"
    values = (await sdk.threads.get_state(thread["thread_id"]))["values"]
    assert values["digest"] == expected_digest(30)
    (replacement,) = ground.containers("executor")
    assert replacement != killed


async def executors_wanted(ground):
    app = ground.deployment.names[1]
    service = await ground.deployment.stacks.resource(app, "AWS::ECS::Service", "Executors")
    async with ground.deployment.stacks.client("ecs") as ecs:
        cluster = service.split("/")[-2]
        (found,) = (await ecs.describe_services(cluster=cluster, services=[service]))["services"]
    return found["desiredCount"]


@pytest.mark.long
async def test_waiting_runs_bring_executors_and_idle_ones_go(sdk, ground):
    """The schedule calls the scaler, which publishes the age of ready runs and the free slots; the deployed alarms on these
    notify the topic, and the scaler asks the service for three tasks, and then for one. What is shortened: the scaler's
    patience with a backlog and with idle executors, and the window of the alarm on these, of ten minutes. Red when the
    scaler is not called by one of them, or asks another service."""
    stacks, (_, app) = ground.deployment.stacks, ground.deployment.names
    scaler = await stacks.resource(app, "AWS::Lambda::Function", "ScheduledScaler")
    shrink = await stacks.resource(app, "AWS::CloudWatch::Alarm", "ScaleDefaultShrink")
    async with stacks.client("lambda") as functions, stacks.client("cloudwatch") as cloudwatch:
        settings = (await functions.get_function_configuration(FunctionName=scaler))["Environment"]
        settings["Variables"] |= {"SANDFLEET_SCALER_IN_AFTER_S": "0", "SANDFLEET_SCALER_DRAIN_S": "1"}
        await functions.update_function_configuration(FunctionName=scaler, Environment=settings)
        (alarm,) = (await cloudwatch.describe_alarms(AlarmNames=[shrink]))["MetricAlarms"]
        kept = (
            "AlarmName MetricName Namespace Dimensions Statistic Period Threshold ComparisonOperator AlarmActions "
            "TreatMissingData"
        )
        await cloudwatch.put_metric_alarm(**{name: alarm[name] for name in kept.split()}, EvaluationPeriods=1)
    assert await executors_wanted(ground) == 1
    slots, runs = 64, []
    for _ in range(slots + 80):
        thread_id = str(uuid.uuid4())
        run = await sdk.runs.create(
            thread_id, "slow", input={"seconds": 3600, "piece_ms": 3_600_000}, if_not_exists="create"
        )
        runs.append((thread_id, run["run_id"]))

    async def there(count):
        return await executors_wanted(ground) == count == len(ground.containers("executor"))

    await eventually(lambda: there(3), 600, "three executors")
    for thread_id, run_id in runs:
        await sdk.runs.cancel(thread_id, run_id)
    for thread_id, run_id in runs:
        assert await ended(sdk, thread_id, run_id) == "interrupted"
    await eventually(lambda: there(1), 600, "one executor")


@pytest.mark.long
async def test_an_update_under_load_loses_no_run_and_brings_the_new_graph(sdk, ground, tmp_path):
    """Executors with a changed project replace the others while runs are accepted and run. Red when a run of an executor that
    is stopped is not taken over, or the new image is not what is deployed."""
    project = make_project(tmp_path / "project", {**GRAPHS, "newer": "./counter.py:graph"})
    accepted, stop = [], asyncio.Event()

    async def submit():
        while not stop.is_set():
            thread = await sdk.threads.create()
            run = await sdk.runs.create(thread["thread_id"], "counter", input={"steps": 20, "delay_ms": 200})
            accepted.append((thread["thread_id"], run["run_id"]))

    before = ground.containers("executor")
    assembly = await ground.deployment.synthesize(project=str(project))
    async with asyncio.TaskGroup() as group:
        group.create_task(submit())
        try:
            await eventually(lambda: len(accepted) >= 5, ENDED_S, "runs")
            await ground.deployment.deploy(assembly)

            async def replaced():
                return await asyncio.to_thread(
                    lambda: (now := ground.containers("executor")) and not now & before
                )

            await eventually(replaced, ENDED_S, "new executors alone")
            count = len(accepted)
            await eventually(lambda: len(accepted) >= count + 5, ENDED_S, "runs after it")
        finally:
            stop.set()
    for thread_id, run_id in accepted:
        assert await ended(sdk, thread_id, run_id) == "success"
        state = await sdk.threads.get_state(thread_id)
        assert state["values"]["digest"] == expected_digest(20)
    assert (await values_of(sdk, "newer", {"steps": 3}))["digest"] == expected_digest(3)


async def test_nothing_is_left_after_the_stacks_are_removed(ground):
    """Red when a resource is not the stacks' own, or the emulator keeps a task for a service that is gone."""
    assert ground.containers("executor")
    assert ground.containers("gateway")
    await ground.deployment.remove()
    stacks = ground.deployment.stacks
    async with (
        stacks.client("lambda") as functions,
        stacks.client("sqs") as sqs,
        stacks.client("ecs") as ecs,
        stacks.client("elbv2") as balancers,
        stacks.client("events") as events,
    ):

        async def left():
            return [
                *(await functions.list_functions())["Functions"],
                *(await sqs.list_queues()).get("QueueUrls", ()),
                *(await ecs.list_clusters())["clusterArns"],
                *(await balancers.describe_load_balancers())["LoadBalancers"],
                *(await events.list_rules())["Rules"],
                *ground.containers(),
            ]

        async def nothing():
            return not await left()

        await eventually(nothing, 120, "the deployment's removal")
