"""The templates of ``cdk deploy`` on this machine: an emulator of AWS runs them, with executors and the gateway as containers
of images that are built here, on embedded servers, and with a sandbox host beside it.

docs/deploy.md says what that proves of a deployment on AWS, and what the emulator only pretends.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from sandfleet.fleet.graphs.project import read_project
from sandfleet.fleet.host.base_image import ensure_image
from sandfleet.infra_cdk.local_images import STEP
from sandfleet.localstack import docker_api
from sandfleet.localstack.emulated_stacks import EmulatedStacks
from sandfleet.localstack.engine import choose_sandboxing
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.ministack import Tasks, start_ministack
from sandfleet.localstack.parallel import parallel, uninterrupted
from sandfleet.localstack.process import LocalStackError, Process, free_port, tcp_answers
from sandfleet.localstack.provider import start_provider
from sandfleet.localstack.sandbox_templates import templates_path
from sandfleet.localstack.servers import database_server, redis_server
from sandfleet.localstack.supervisor import Supervisor
from sandfleet.localstack.task_network import (
    TaskNetwork,
    make_task_network,
    remove_task_network,
    start_forwarder,
)

REGION = "us-east-1"
SERVICES = (
    "cloudformation,lambda,apigateway,apigatewayv2,sqs,s3,sns,iam,ec2,ecs,elbv2,elasticloadbalancing,cloudwatch,monitoring,"
    "logs,events,secretsmanager,ssm,sts,ecr,autoscaling"
)
"""What the templates use."""
IMAGE = "sandfleet-sandbox:latest"
"""Of sandboxes; it has a Python, so executor and gateway are built on it, too."""
_LOOPBACK = ("127.0.0.1", "localhost")
_STILL_S = 10.0  # after which a step that goes on is told again
_SAVE_S = 40.0  # for a host that stops: its workspaces are kept, its sandboxes removed


@dataclass(frozen=True)
class Deployed:
    """A deployment. ``url`` is API Gateway's, before the Lambda; ``stream_url`` the load balancer's, before the gateway, which
    answers all requests, and streams; ``endpoint`` the emulator's own, ``key_function`` the function that makes keys."""

    url: str
    stream_url: str
    endpoint: str
    key_function: str


class LocalDeployment:
    """A deployment whose files are below ``root``, of the ``langgraph.json`` at ``project``.

    ``context`` is what ``cdk -c`` gets: size, environment, … What is in cdk.json holds, too, but for the fleet. ``env`` is the environment for servers that are the user's
    own (``DATABASE_URL``, ``REDIS_URL``) and for the sandbox host. ``say`` gets a line for each step that a person may
    want to see. ``engine_dir`` is where an engine of our own keeps its images.
    """

    def __init__(
        self,
        root: Path,
        project: Path,
        *,
        context: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda _: None,
        engine_dir: Path | None = None,
    ) -> None:
        self.supervisor = Supervisor(root, on_event=say)
        self.project = project.resolve()
        self._context = dict(context or {})
        self._env = dict(os.environ if env is None else env)
        self._say = say
        self._engine_dir = (engine_dir or self.supervisor.root / "docker").resolve()
        self._name = str(self._context.get("name", "sandfleet"))
        self._docker_host: str | None = None
        self._network: TaskNetwork | None = None
        self._database_url = self._redis_url = self._provider_url = ""
        self._deployed = False  # else there is nothing to delete: the emulator goes with what it has
        self._stacks: EmulatedStacks | None = None

    @property
    def stacks(self) -> EmulatedStacks:
        """The stacks on the emulator; raises `LocalStackError` before the start."""
        if self._stacks is None:
            raise LocalStackError("The deployment was not started.")
        return self._stacks

    @property
    def docker_host(self) -> str:
        """The engine with the containers; raises `LocalStackError` before the start."""
        if self._docker_host is None:
            raise LocalStackError("The deployment was not started.")
        return self._docker_host

    @property
    def names(self) -> tuple[str, str]:
        """The stack that holds data, and the one that works on it."""
        return f"{self._name}-data", f"{self._name}-app"

    async def start(self) -> Deployed:
        """Start servers and emulator, build the images, deploy both stacks, and start a sandbox host. Call `stop` if this
        raises."""
        if not self.project.is_file():
            raise LocalStackError(f"{self.project} does not exist. Name a langgraph.json with --project.")
        read_project(self.project).check_paths()
        if find_spec("aws_cdk") is None:
            raise LocalStackError(
                "aws-cdk-lib is not installed: `make install-cdk` brings what deployments need."
            )
        removed = await self.supervisor.open()
        if removed:
            self._say(f"Removed what a killed deployment left: {', '.join(removed)}")
        (self._database_url, _), self._redis_url, provider_port, _ = await parallel(
            database_server(self.supervisor, self._env, self._say),
            redis_server(self.supervisor, self._env, self._say),
            start_provider(self.supervisor),
            self._prepare_engine(),
        )
        self._provider_url = f"http://127.0.0.1:{provider_port}/v1"
        assembly, _ = await parallel(self.synthesize(), self._start_emulator())
        deployed = await self.deploy(assembly)
        await self._start_host()
        return deployed

    async def stop(self) -> list[str]:
        """Remove the stacks, then stop everything. Safe to call at any time; being cancelled does not keep it from finishing.

        Returns what had to be removed by force; empty is normal.
        """
        return await uninterrupted(self._stop())

    async def _stop(self) -> list[str]:
        if not self.supervisor.holds_folder:
            return []
        removed = []
        ministack = self.supervisor.processes.get("ministack")
        if self._deployed and ministack is not None and ministack.pid is not None:
            try:
                await self.remove()
            except (LocalStackError, OSError) as error:
                removed.append(f"the stacks, since they could not be deleted: {error}")
        await self.supervisor.stop("host")
        await self.supervisor.stop("ministack")
        if self._docker_host is not None:
            await asyncio.to_thread(
                docker_api.remove_ended_tasks, self._docker_host, self.supervisor.instance
            )
            if self._network is not None:
                await asyncio.to_thread(remove_task_network, self._docker_host, self._network)
            removed += await asyncio.to_thread(
                docker_api.remove_labelled, self._docker_host, f"{LABEL}={self.supervisor.instance}"
            )
        return removed + await self.supervisor.close()

    async def synthesize(self, **context: object) -> Path:
        """Build images, and write the templates for them; returns the assembly. ``context`` goes before the deployment's."""
        chosen = {**_cdk_json(), "project": str(self.project), **self._context, **context}
        self._say("Building images of executor and gateway: a minute or two the first time")
        names = await self._run(
            *("sandfleet.infra_cdk.local_images", "--json", "--base", IMAGE),
            *("--project", str(chosen["project"])),
        )
        self._say("Images of executor and gateway are ready")
        folder = self.supervisor.root / "cdk.out"
        given = chosen.get("environment", {})
        environment = {"SANDFLEET_PROVIDER_URL": self._from_tasks(self._provider_url)}
        settings = {
            **chosen,
            "fleet": "fargate",  # the emulator has no machines
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",  # it runs functions with its own
            "images": json.loads(names),
            "environment": {**environment, **given} if isinstance(given, dict) else given,
        }
        self._say("Writing the templates")
        await self._run(
            "sandfleet.infra_cdk.app", CDK_OUTDIR=str(folder), CDK_CONTEXT_JSON=json.dumps(settings)
        )
        self._say("The templates are written")
        return folder

    async def deploy(self, assembly: Path) -> Deployed:
        """Create the stacks of an assembly, or update them."""
        data, app = self.names
        stacks = self.stacks
        self._say(f"Deploying the stacks {data} and {app}")
        await stacks.publish(assembly)
        await stacks.deploy(
            assembly,
            data,
            DatabaseUrl=self._from_tasks(self._database_url),
            RedisUrl=self._from_tasks(self._redis_url),
        )
        self._say(f"The stack {data} is deployed")
        outputs = await stacks.deploy(assembly, app, EmulatorEndpoint=self._from_tasks(stacks.endpoint))
        self._deployed = True
        self._say(f"The stack {app} is deployed")
        api = urlsplit(outputs["Url"]).netloc.partition(".")[0]
        balancer = await stacks.resource(app, "AWS::ElasticLoadBalancingV2::LoadBalancer", "GatewayBalancer")
        return Deployed(
            url=f"{stacks.endpoint}/restapis/{api}/v1/_user_request_",
            stream_url=f"{stacks.endpoint}/_alb/{balancer.split('/')[-2]}",
            endpoint=stacks.endpoint,
            key_function=outputs["KeyFunction"],
        )

    async def make_key(self, deployed: Deployed, tenant: str, user: str) -> str:
        """A new API key, made as docs/deploy.md says."""
        payload = json.dumps({"tenant": tenant, "user": user}).encode()
        async with self.stacks.client("lambda") as functions:
            answer = await functions.invoke(FunctionName=deployed.key_function, Payload=payload)
            return str(json.loads(await answer["Payload"].read())["api_key"])

    async def remove(self) -> None:
        """Delete both stacks, and what the emulator ran for them."""
        await self.stacks.remove(*reversed(self.names))
        self._deployed = False
        self._say("The stacks are removed")

    async def _prepare_engine(self) -> None:
        sandboxing = await choose_sandboxing(
            self.supervisor, "docker", self._engine_dir, self._env, self._say
        )
        assert sandboxing.docker_host is not None
        self._docker_host = sandboxing.docker_host
        self.supervisor.use_engine(sandboxing.docker_host)
        await ensure_image(sandboxing.docker_host, IMAGE, on_progress=self._say)
        self._network = await asyncio.to_thread(
            make_task_network, sandboxing.docker_host, self.supervisor.instance, IMAGE
        )
        self._say(f"Docker Engine {sandboxing.version} at {sandboxing.docker_host} is ready")

    async def _start_emulator(self) -> None:
        network = self._network
        assert network is not None

        async def nothing(_: str) -> None: ...

        endpoint = await start_ministack(
            self.supervisor, REGION, nothing, SERVICES, Tasks(self.docker_host, network)
        )
        self._stacks = EmulatedStacks(endpoint, REGION)
        urls = (self._database_url, self._redis_url, self._provider_url, endpoint)
        await start_forwarder(self.supervisor, network, *(port for url in urls if (port := _own_port(url))))
        self._say("The emulator is ready")

    async def _start_host(self) -> None:
        """A sandbox host beside the emulator, which has no machines: by TCP, as executors on Fargate use hosts."""
        network, stacks = self._network, self.stacks
        assert network is not None
        data, _ = self.names
        arn = await stacks.resource(data, "AWS::SecretsManager::Secret", "HostSecret")
        async with stacks.client("secretsmanager") as secrets:
            secret = json.loads((await secrets.get_secret_value(SecretId=arn))["SecretString"])["host_secret"]
        bucket = await stacks.resource(data, "AWS::S3::Bucket", "Snapshots")
        own = {k: v for k, v in self._env.items() if k.startswith("SANDFLEET_")}
        templates = templates_path(self.project, self._env)

        def host(port: int) -> Process:
            env = {
                "SANDFLEET_HOST_DRAIN_GRACE_S": "5",
                **self.supervisor.base_env(),
                **own,
                "SANDFLEET_DATABASE_URL": self._database_url,
                "SANDFLEET_AWS_ENDPOINT_URL": stacks.endpoint,
                "SANDFLEET_AWS_REGION": REGION,
                "SANDFLEET_SNAPSHOT_BUCKET": bucket,
                "SANDFLEET_HOST_SECRET": secret,
                "SANDFLEET_HOST_SOCKET": str(self.supervisor.run_dir / "host.sock"),
                "SANDFLEET_HOST_DIR": str(self.supervisor.run_dir / "host"),
                "SANDFLEET_HOST_LISTEN": f"127.0.0.1:{port}",
                "SANDFLEET_HOST_ADDRESS": f"http://{network.address}:{port}",
                "SANDFLEET_DOCKER_HOST": self.docker_host,
                **({"SANDFLEET_TEMPLATES": str(templates.resolve())} if templates else {}),
            }
            return Process(
                name="host",
                argv=[sys.executable, "-P", "-m", "sandfleet.fleet.host"],
                env=env,
                cwd=self.supervisor.root,
                log=self.supervisor.logs / "host.log",
                ready=lambda: tcp_answers(port),
                stop_timeout_s=float(env["SANDFLEET_HOST_DRAIN_GRACE_S"]) + _SAVE_S,
            )

        port = await self.supervisor.start_on_port(host, free_port())
        await start_forwarder(self.supervisor, network, port, name="host-forwarder")
        self._say("The sandbox host is ready")

    def _from_tasks(self, url: str) -> str:
        """A server's URL as tasks and functions reach it."""
        assert self._network is not None
        return (
            url.replace(f"{urlsplit(url).hostname}:", f"{self._network.address}:") if _own_port(url) else url
        )

    async def _run(self, module: str, *words: str, **variables: str) -> str:
        """What a module of ours prints, in a process of its own: these are busy for long. It gets the whole environment, which
        may say how packages are fetched. Its steps are told as they begin, and of a long one that it goes on. Raises
        `LocalStackError`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", "-m", module, *words),
            env={**self._env, "DOCKER_HOST": self.docker_host, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            reading = asyncio.ensure_future(process.stdout.read())
            errors = await self._follow(process.stderr)
            output = await reading
            await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise LocalStackError(f"{module} failed:\n{errors.strip()[-3000:]}")
        return output.decode()

    async def _follow(self, stream: asyncio.StreamReader) -> str:
        """Tell the steps on a process's standard error; returns the rest of it."""
        rest, pending, step = "", b"", ""
        while True:
            try:
                async with asyncio.timeout(_STILL_S):
                    piece = await stream.read(64 * 1024)
            except TimeoutError:
                if step:
                    self._say(f"  still {step}")
                continue
            *lines, pending = (pending + piece).split(b"\n")
            for line in [*lines, pending] if not piece else lines:
                text = line.decode(errors="replace")
                if text.startswith(STEP):
                    step = text.removeprefix(STEP)
                    self._say(f"  {step}")
                else:
                    rest += f"{text}\n"
            if not piece:
                return rest


def _own_port(url: str) -> int | None:
    """The port of a server of this machine that listens on the loopback address alone; None for others."""
    parts = urlsplit(url)
    return parts.port if parts.hostname in _LOOPBACK else None


def _cdk_json() -> dict[str, object]:
    """The context in cdk.json."""
    root = Path(__file__).resolve().parent.parent
    return dict(json.loads((root / "cdk.json").read_bytes())["context"])
