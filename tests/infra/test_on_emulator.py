"""The templates on MiniStack: deployed, used through its API Gateway, and removed. docs/deploy.md says what that proves.

The command line's part is done here: assets are put where the templates look for them, and stacks are made in order.
"""

import asyncio
import json
import os
import sys
import uuid
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import psycopg
import pytest
from aiobotocore.session import get_session
from langgraph_sdk import get_client

from sandfleet.infra_cdk import packaging
from sandfleet.infra_cdk.deployment import read_deployment
from sandfleet.localstack.ministack import start_ministack
from sandfleet.localstack.servers import database_url
from tests.fixtures_servers import open_supervisor
from tests.infra.conftest import Template, read_templates
from tests.waiting import eventually

REGION = "us-east-1"
pytestmark = pytest.mark.long
SERVICES = (
    "cloudformation,lambda,apigateway,apigatewayv2,sqs,s3,sns,iam,ec2,ecs,elbv2,elasticloadbalancing,cloudwatch,monitoring,"
    "logs,events,secretsmanager,ssm,sts,ecr,autoscaling"
)
ASSETS = f"cdk-hnb659fds-assets-000000000000-{REGION}"
PROJECT = Path(__file__).parent.parent / "projects" / "basic" / "langgraph.json"


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """In place of the check after each test: the emulator keeps processes of functions, and their connections, until it ends
    with this module. What the deployment leaves behind, `nothing_is_left` looks for."""


@pytest.fixture(scope="module")
async def emulator():
    """An emulator of this module's own, with all services that the templates use."""
    supervisor = await open_supervisor("emulator")

    async def nothing(_: str) -> None: ...

    try:
        yield await start_ministack(supervisor, REGION, nothing, SERVICES)
    finally:
        await supervisor.close()


@pytest.fixture(scope="module")
async def empty_database(servers):
    """URL of a database without a schema."""
    name = f"test_{uuid.uuid4().hex}"
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as connection:
        await connection.execute(f"create database {name}")
    url = database_url(servers.admin_url, name)
    yield url
    await servers.drop_database(url)


def client(service: str, endpoint: str):
    return get_session().create_client(
        service,
        region_name=REGION,
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


async def publish_code(endpoint: str, template: Template) -> None:
    """Put the Lambdas' real package where the template looks for its placeholder."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"  # the emulator runs functions with its own
    code = packaging.lambda_code(read_deployment({"python": python}))
    archive = await asyncio.to_thread(zipped, code)
    keys = {f["Code"]["S3Key"] for f in template.of_type("AWS::Lambda::Function").values()}
    async with client("s3", endpoint) as s3, client("ssm", endpoint) as ssm:
        with suppress(s3.exceptions.BucketAlreadyOwnedByYou):  # the emulator keeps buckets in its folder
            await s3.create_bucket(Bucket=ASSETS)
        for key in keys:
            await s3.put_object(Bucket=ASSETS, Key=key, Body=archive)
        await ssm.put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Value="30", Type="String")


def zipped(folder: Path) -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return buffer.getvalue()


async def deploy(endpoint: str, template: Template, **parameters: str) -> dict[str, str]:
    """Create a stack and wait; its outputs. Templates are too long for a request, so they go the way of assets."""
    name = template.name.rpartition("/")[2]
    async with client("s3", endpoint) as s3:
        await s3.put_object(Bucket=ASSETS, Key=f"{name}.json", Body=json.dumps(template.body).encode())
    async with client("cloudformation", endpoint) as cloudformation:
        await cloudformation.create_stack(
            StackName=name,
            TemplateURL=f"{endpoint}/{ASSETS}/{name}.json",
            Parameters=[
                {"ParameterKey": key, "ParameterValue": value}
                for key, value in {"Emulated": "true", **parameters}.items()
            ],
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        return await created(cloudformation, name)


async def created(cloudformation, name: str) -> dict[str, str]:
    async def done():
        (stack,) = (await cloudformation.describe_stacks(StackName=name))["Stacks"]
        assert "FAILED" not in stack["StackStatus"], stack.get("StackStatusReason")
        assert "ROLLBACK" not in stack["StackStatus"], stack.get("StackStatusReason")
        return stack if stack["StackStatus"] == "CREATE_COMPLETE" else None

    stack = await eventually(done, 240, f"the stack {name}")
    return {output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", [])}


@pytest.fixture(scope="module")
async def outputs(synthesized, emulator, empty_database, redis_url):
    """Both stacks; yields what the second one says of itself, and removes them."""
    data, app = sorted(read_templates(synthesized, {"dev": None}), key=lambda t: not t.name.endswith("-data"))
    await publish_code(emulator, app)
    async with client("cloudformation", emulator) as cloudformation:
        await deploy(emulator, data, DatabaseUrl=empty_database, RedisUrl=redis_url)
        yield await deploy(emulator, app, EmulatorEndpoint=emulator)
        for name in ("sandfleet-app", "sandfleet-data"):
            await cloudformation.delete_stack(StackName=name)
    await nothing_is_left(emulator)


@pytest.fixture(scope="module")
def deployed(outputs, emulator):
    """The API's URL on the emulator."""
    api = outputs["Url"].split("//")[1].split(".")[0]
    return f"{emulator}/restapis/{api}/v1/_user_request_"


async def nothing_is_left(endpoint: str) -> None:
    async with (
        client("lambda", endpoint) as functions,
        client("sqs", endpoint) as sqs,
        client("ecs", endpoint) as ecs,
    ):

        async def gone():
            return not (
                (await functions.list_functions())["Functions"]
                or (await sqs.list_queues()).get("QueueUrls")
                or (await ecs.list_clusters())["clusterArns"]
            )

        await eventually(gone, 120, "the deployment's removal")


@pytest.fixture(scope="module")
async def key(outputs, emulator):
    """A first key, made as docs/deploy.md says."""
    async with client("lambda", emulator) as functions:
        answer = await functions.invoke(
            FunctionName=outputs["KeyFunction"],
            Payload=json.dumps({"tenant": "acme", "user": "ann"}).encode(),
        )
        return json.loads(await answer["Payload"].read())["api_key"]


@pytest.fixture(scope="module")
async def executor(deployed, emulator, empty_database, redis_url, tmp_path_factory):
    """An executor beside the emulator, on the deployment's own queue: the emulator would need images for one within."""
    async with client("sqs", emulator) as sqs:
        urls = (await sqs.list_queues())["QueueUrls"]
    (queue,) = [url for url in urls if "Dead" not in url]
    log = (tmp_path_factory.mktemp("executor") / "log").open("wb")
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SANDFLEET_", "AWS_"))},
        "SANDFLEET_DATABASE_URL": empty_database,
        "SANDFLEET_REDIS_URL": redis_url,
        "SANDFLEET_AWS_ENDPOINT_URL": emulator,
        "SANDFLEET_QUEUE_URLS": json.dumps({"default": queue}),
        "SANDFLEET_PROJECT": str(PROJECT),
        "SANDFLEET_DRAIN_GRACE_S": "1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "sandfleet.fleet.executor", env=env, stdout=log, stderr=log
    )
    yield process
    process.terminate()
    await process.wait()
    log.close()


@pytest.fixture
async def closing():
    async with AsyncExitStack() as stack:
        yield stack


async def test_the_schema_was_migrated_by_the_deployment(deployed, empty_database):
    """Red when the custom resource does not call the function, or the function's package has no revisions."""
    async with await psycopg.AsyncConnection.connect(empty_database) as connection:
        (count,) = await (await connection.execute("select count(*) from alembic_version")).fetchone()
        assert count == 1
        await connection.execute("select 1 from runs")


async def test_a_request_reaches_the_packaged_lambda_on_every_kind_of_path(deployed, key):
    """Red when API Gateway has no resource for one, or the package lacks what the handler imports."""
    async with httpx.AsyncClient(trust_env=False, timeout=120, headers={"x-api-key": key}) as http:
        assert (await http.get(f"{deployed}/ok")).json() == {"ok": True}
        assert (await http.post(f"{deployed}/threads/search", json={})).json() == []
        assert (await http.get(f"{deployed}/runs/{uuid.uuid4()}/timing")).status_code == 404
        path = f"threads/{uuid.uuid4()}/runs/{uuid.uuid4()}/tool_calls"
        assert (await http.get(f"{deployed}/{path}")).status_code == 404
        assert (await http.get(f"{deployed}/threads", headers={"x-api-key": "wrong"})).status_code == 401


async def test_a_run_goes_through_gateway_lambda_and_queue_to_an_executor_and_back(
    deployed, key, executor, closing
):
    """Red when the Lambda cannot reach the database, or its permit the deployment's queue."""
    sdk = get_client(url=deployed, api_key=key)
    closing.push_async_callback(sdk.http.client.aclose)

    async def registered():
        return await sdk.assistants.search(graph_id="counter")

    await eventually(registered, 240, "the executor's graphs")
    thread = await sdk.threads.create()
    run = await sdk.runs.create(thread["thread_id"], "counter", input={"steps": 1})

    async def ended():
        found = await sdk.runs.get(thread["thread_id"], run["run_id"])
        return found if found["status"] not in ("pending", "running") else None

    assert (await eventually(ended, 240, "the run's end"))["status"] == "success"
