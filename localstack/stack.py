"""The whole of sandfleet on one machine: servers, API, executors, sandbox host and scripted model provider."""

import asyncio
import importlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psycopg

from sandfleet.fleet.graphs.project import read_project
from sandfleet.fleet.host import firewall
from sandfleet.fleet.host.base_image import ensure_image
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.firewall import FirewallError
from sandfleet.fleet.host.template_check import refusals
from sandfleet.localstack import dev_file, docker_api
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.engine import Sandboxing, choose_sandboxing, ensure_nft
from sandfleet.localstack.leftovers import INSTANCE_VARIABLE, LABEL
from sandfleet.localstack.parallel import parallel, uninterrupted
from sandfleet.localstack.process import LocalStackError, Process, free_port
from sandfleet.localstack.provider import start_provider
from sandfleet.localstack.sandbox_templates import TRIAL_LABELS, templates_of, templates_path
from sandfleet.localstack.servers import Servers, start_servers
from sandfleet.localstack.supervisor import Supervisor
from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key, hash_key

_REMOVE_S = 20.0  # for a host that stops: its sandboxes are removed
OWNER = Owner("local", "developer")
# Set but empty, these mean the same as not set: embedded servers, the scripted provider.
_EMPTY_IS_UNSET = ("DATABASE_URL", "REDIS_URL", "AWS_ENDPOINT_URL", "SANDFLEET_MODEL")


class Stack:
    """A stack whose files are below ``root`` and whose executors serve the ``langgraph.json`` at ``project``.

    ``env`` is added to this process's environment for the API, the executors and the host. ``sandbox`` is
    ``auto``, ``docker`` or ``bwrap``. With ``restart``, processes that die come back. ``say`` gets a line for each
    step that a person may want to see. ``engine_dir`` is where an engine of our own keeps its images.
    """

    def __init__(
        self,
        root: Path,
        project: Path,
        *,
        executors: int = 1,
        apis: int = 1,
        sandbox: str = "auto",
        env: Mapping[str, str] | None = None,
        restart: bool = False,
        say: Callable[[str], None] = lambda _: None,
        engine_dir: Path | None = None,
        port: int | None = None,
    ) -> None:
        self.supervisor = Supervisor(root, restart=restart, on_event=say)
        self.root = self.supervisor.root
        self.project = project.resolve()
        self.executors = executors
        self.apis = apis
        self._wish = sandbox
        self._env = {k: v for k, v in {**os.environ, **(env or {})}.items() if v or k not in _EMPTY_IS_UNSET}
        self._say = say
        self._engine_dir = (engine_dir or self.root / "docker").resolve()
        self._port = port
        self._secret = secrets.token_hex(32)
        self._info: StackInfo | None = None
        self._sandboxing: Sandboxing | None = None
        self._executors_awaited = executors
        self._started_before: object = None
        self._metrics_ports: dict[str, int] = {}

    @property
    def info(self) -> StackInfo:
        """Addresses and process ids; raises `LocalStackError` before the start."""
        if self._info is None:
            raise LocalStackError("The stack is not running.")
        return self._info

    @property
    def host_secret(self) -> str:
        """The key that signs tokens for its sandbox host."""
        return self._secret

    @property
    def dev_json(self) -> Path:
        """Where the info is written."""
        return self.root / "dev.json"

    async def start(self) -> StackInfo:
        """Start everything and return when an executor serves the project. Stop the stack if this raises."""
        if not self.project.is_file():
            raise LocalStackError(f"{self.project} does not exist. Name a langgraph.json with --project.")
        read_project(self.project).check_paths()  # before minutes may go by with servers and images
        removed = await self.supervisor.open()
        if removed:
            self._say(f"Removed what a killed stack left: {', '.join(removed)}")
        self.dev_json.unlink(missing_ok=True)
        servers, (sandboxing, provider_port) = await parallel(
            self._start_servers(), parallel(self._prepare_sandboxes(), start_provider(self.supervisor))
        )
        api_key = await self._migrate(servers.database_url)
        host_socket = self.supervisor.run_dir / "host.sock"
        self._info = StackInfo(
            api_url="",  # known when the API listens
            api_key=api_key,
            database_url=servers.database_url,
            redis_url=servers.redis_url,
            aws_endpoint_url=servers.aws_endpoint_url,
            queue_urls=servers.queue_urls,
            snapshot_bucket=servers.snapshot_bucket,
            provider_url=f"http://127.0.0.1:{provider_port}/v1",
            host_socket=str(host_socket),
            instance=self.supervisor.instance,
            sandbox=sandboxing.backend,
            docker_host=sandboxing.docker_host,
        )
        await self._mark_executors(awaited=self.executors)
        apis, *_ = await parallel(
            parallel(*(self._start_api(number) for number in range(1, self.apis + 1))),
            *(self.supervisor.start(self._executor(number)) for number in range(1, self.executors + 1)),
            self.supervisor.start(self._host(host_socket)),
        )
        self._info = replace(self.info, api_url=apis[0], api_urls=list(apis))
        self.supervisor.on_change = self._write
        self._write()
        self._say("API, executors and sandbox host are ready")
        return self.info

    async def stop(self) -> list[str]:
        """Stop everything: runs end or are handed over, sandboxes go, then the servers. Safe to call at any time.

        Being cancelled does not keep it from finishing. Returns what had to be removed by force; empty is normal.
        """
        return await uninterrupted(self._stop())

    async def _stop(self) -> list[str]:
        if not self.supervisor.holds_folder:
            return []
        self.supervisor.on_change = lambda: None
        names = list(self.supervisor.processes)
        await self.supervisor.stop(*(n for n in names if n.startswith(("api", "executor"))))
        await self.supervisor.stop("host")
        removed = []
        if self._sandboxing is not None and self._sandboxing.docker_host is not None:
            label = f"{LABEL}={self.supervisor.instance}"
            removed = await asyncio.to_thread(docker_api.remove_labelled, self._sandboxing.docker_host, label)
        removed += await self.supervisor.close()
        if os.geteuid() == 0:
            with suppress(FirewallError):  # another stack's sandboxes have networks
                await firewall.uninstall()
        self.dev_json.unlink(missing_ok=True)
        self._info = None
        return removed

    async def kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process, and after SIGKILL wait until it is gone.

        After SIGKILL, SIGTERM or SIGINT it stays away until `restart`.
        """
        process = self.supervisor.processes[name]
        if sig in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            process.wanted = False
        process.send(sig)
        if sig == signal.SIGKILL:
            await process.wait(10.0)

    async def pause(self, name: str) -> None:
        """Freeze a process (SIGSTOP)."""
        await self.kill(name, signal.SIGSTOP)

    async def resume(self, name: str) -> None:
        """Let a paused process go on (SIGCONT)."""
        await self.kill(name, signal.SIGCONT)

    async def restart(self, name: str) -> None:
        """Start a process again, on the same addresses, and wait until it is ready."""
        if name.startswith("executor"):
            await self._mark_executors(awaited=1)
        await self.supervisor.restart(name)

    async def _start_servers(self) -> Servers:
        return await start_servers(self.supervisor, self._env, self._say)

    async def _prepare_sandboxes(self) -> Sandboxing:
        wish = self._env.get("SANDFLEET_SANDBOX", "auto") if self._wish == "auto" else self._wish
        sandboxing = await choose_sandboxing(self.supervisor, wish, self._engine_dir, self._env, self._say)
        if sandboxing.docker_host is not None:
            self.supervisor.use_engine(sandboxing.docker_host)
            self._say(f"Docker Engine {sandboxing.version} at {sandboxing.docker_host}")
            tag = self._env.get("SANDFLEET_SANDBOX_IMAGE", "sandfleet-sandbox:latest")
            await ensure_image(sandboxing.docker_host, tag, on_progress=self._say)
            self._say(f"Sandbox image {tag} is ready")
            await self._check_templates(sandboxing.docker_host)
        self._sandboxing = sandboxing
        return sandboxing

    async def _check_templates(self, docker_host: str) -> None:
        templates = templates_of(self.project, self._env)
        if any(template.network == "egress" for template in templates.templates.values()):
            await ensure_nft(self._say)
        async with Engine(docker_host) as engine:
            against = await refusals(engine, list(templates.templates.values()), TRIAL_LABELS)
        if against:
            raise LocalStackError("\n".join(against.values()))

    async def _migrate(self, database_url: str) -> str:
        """Bring the database to the newest schema and return a key that is good for it."""
        migrate = await asyncio.to_thread(importlib.import_module, "sandfleet.shared.db.migrate")
        await asyncio.to_thread(migrate.upgrade, database_url)
        path = self.root / "api-key"
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            key = path.read_text() if path.exists() else ""
            known = await connection.execute(
                "select 1 from api_keys where key_hash = %s and revoked_at is null", (hash_key(key),)
            )
            if await known.fetchone() is None:
                key = await create_key(connection, OWNER, "local")
                path.touch(mode=0o600)
                path.write_text(key)
        return key

    def _settings(self) -> dict[str, str]:
        """The settings that API, executors and host share, under names that no graph of the user's reads."""
        info = self.info
        env = {
            INSTANCE_VARIABLE: self.supervisor.instance,
            "SANDFLEET_DATABASE_URL": info.database_url,
            "SANDFLEET_REDIS_URL": info.redis_url,
            "SANDFLEET_AWS_ENDPOINT_URL": info.aws_endpoint_url,
            "SANDFLEET_QUEUE_URLS": json.dumps(info.queue_urls),
            "SANDFLEET_SNAPSHOT_BUCKET": info.snapshot_bucket,
            "SANDFLEET_HOST_SOCKET": info.host_socket,
            "SANDFLEET_HOST_DIR": str(self.supervisor.run_dir / "host"),
            "SANDFLEET_HOST_SECRET": self._secret,
            "SANDFLEET_SANDBOX": info.sandbox,
            "SANDFLEET_PROVIDER_URL": info.provider_url,
        }
        if templates := templates_path(self.project, self._env):
            env["SANDFLEET_TEMPLATES"] = str(templates.resolve())
        if info.docker_host is not None:
            env["SANDFLEET_DOCKER_HOST"] = info.docker_host
        home = Path(self._env.get("HOME", "/"))
        if not {"AWS_ACCESS_KEY_ID", "AWS_PROFILE"} & self._env.keys() and not (home / ".aws").exists():
            env |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        return env

    def _metrics(self, name: str) -> dict[str, str]:
        """Where a process serves its metrics: a port of its own, the same when it comes back."""
        port = self._metrics_ports.get(name) or self._metrics_ports.setdefault(name, free_port())
        return {"SANDFLEET_METRICS_LISTEN": f"127.0.0.1:{port}"}

    def _service_env(self) -> dict[str, str]:
        """Environment of the API and the host: ours, and the user's ``SANDFLEET_`` and ``AWS_`` variables."""
        own = {k: v for k, v in self._env.items() if k.startswith(("SANDFLEET_", "AWS_", "OTEL_"))}
        return {**self.supervisor.base_env(), **own, **self._settings()}

    async def _start_api(self, number: int) -> str:
        """Start an API process and return its URL."""

        def api(port: int) -> Process:
            async def ready() -> bool:
                try:
                    async with httpx.AsyncClient(trust_env=False) as client:
                        return (await client.get(f"http://127.0.0.1:{port}/ok", timeout=2.0)).is_success
                except httpx.HTTPError:
                    return False

            name = "api" if number == 1 else f"api-{number}"
            address = {"SANDFLEET_API_HOST": "127.0.0.1", "SANDFLEET_API_PORT": str(port)}
            return self._python(
                name,
                "sandfleet.functions.api",
                {**self._service_env(), **address, **self._metrics(name)},
                ready,
            )

        wish = self._port if number == 1 else None
        return f"http://127.0.0.1:{await self.supervisor.start_on_port(api, wish)}"

    def _executor(self, number: int) -> Process:
        # The graphs run here, so this is the one process that gets the whole environment, model keys included.
        env = {**self._env, **self._settings(), "SANDFLEET_PROJECT": str(self.project)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        name = f"executor-{number}"
        env |= self._metrics(name)
        return self._python(
            name, "sandfleet.fleet.executor", env, self._executor_ready, cwd=self.project.parent
        )

    def _host(self, socket: Path) -> Process:
        async def ready() -> bool:
            try:
                _, writer = await asyncio.open_unix_connection(str(socket))
            except OSError:
                return False
            writer.close()
            return True

        socket.unlink(missing_ok=True)
        own = {"SANDFLEET_HOST_DRAIN_GRACE_S": "5", "SANDFLEET_HOST_SAVE_S": "20"}
        env = {**own, **self._service_env(), **self._metrics("host")}
        stop_s = sum(float(env[name]) for name in own)
        return self._python("host", "sandfleet.fleet.host", env, ready, stop_timeout_s=stop_s + _REMOVE_S)

    def _python(
        self,
        name: str,
        module: str,
        env: dict[str, str],
        ready: Callable[[], Awaitable[bool]],
        *,
        cwd: Path | None = None,
        stop_timeout_s: float | None = None,
    ) -> Process:
        # -P: a module of the user's in the working directory never hides one of Python's or ours.
        argv = [sys.executable, "-P", "-m", module]
        log = self.supervisor.logs / f"{name}.log"
        return Process(
            name,
            argv,
            env,
            cwd or self.root,
            log,
            ready,
            stop_timeout_s=stop_timeout_s or float(env.get("SANDFLEET_DRAIN_GRACE_S", 10)) + 10,
        )

    async def _mark_executors(self, awaited: int) -> None:
        """Remember the database's time: an executor that is started from here on registers later than that."""
        async with await psycopg.AsyncConnection.connect(self.info.database_url) as connection:
            row = await (await connection.execute("select clock_timestamp()")).fetchone()
        self._started_before = row[0] if row else None
        self._executors_awaited = awaited

    async def _executor_ready(self) -> bool:
        async with await psycopg.AsyncConnection.connect(self.info.database_url) as connection:
            row = await (
                await connection.execute(
                    "select count(*) from executors where started_at > %s", (self._started_before,)
                )
            ).fetchone()
        return row is not None and row[0] >= self._executors_awaited

    def _write(self) -> None:
        processes = {name: p.pid for name, p in self.supervisor.processes.items() if p.pid is not None}
        metrics = {name: f"http://127.0.0.1:{port}/metrics" for name, port in self._metrics_ports.items()}
        self._info = replace(self.info, processes=processes, metrics_urls=metrics)
        dev_file.write(self.dev_json, self._info)
