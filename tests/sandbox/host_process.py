"""A sandbox host in a process of its own, as tests drive it."""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import psycopg

from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.hosts import OneHost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.sandbox_token import sign
from tests.waiting import eventually

INSERT_RUN = """
    insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
                      multitask_strategy, timeout_s, kwargs, metadata)
    values (%s, %s, %s, %s, %s, 'graph', 'run', 'default', 0, 'running', 'reject', 60, '{}', '{}')
"""

PLACE = """
    insert into placements (tenant, user_id, run_id, host_id, template, memory, pids) values (%s, %s, %s, %s, 'default', 0, 0)
    on conflict (tenant, user_id, run_id) do update set host_id = excluded.host_id
"""


@dataclass
class Host:
    """A running ``python -m sandfleet.fleet.host``, and runs for which sandboxes can be asked of it."""

    folder: Path
    database_url: str
    backend: str
    docker_host: str
    env: dict[str, str] = field(default_factory=dict)
    instance: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    process: asyncio.subprocess.Process | None = None
    pids_before: set[int] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)
    """Names that this process, and no other of the machine, knows the addresses of."""
    namespace: str | None = None
    """The network namespace that it runs in, as ``ip netns`` names it; None: that of the tests."""

    @property
    def host_id(self) -> str:
        """Its name in PostgreSQL."""
        return self.env.get("SANDFLEET_HOST_ID") or f"{socket.gethostname()}/{self.instance}"

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "host.sock"

    @property
    def log(self) -> Path:
        return self.folder / "host.log"

    async def start(self) -> None:
        """Start it and wait until it serves and knows the database's clock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "SANDFLEET_INSTANCE": self.instance,
            "SANDFLEET_HOST_SECRET": self.secret,
            "SANDFLEET_HOST_SOCKET": str(self.socket),
            "SANDFLEET_HOST_DIR": str(self.folder / "host"),
            "SANDFLEET_SANDBOX": self.backend,
            "DOCKER_HOST": self.docker_host,
            "DATABASE_URL": self.database_url,
            "SANDFLEET_REAP_EVERY_S": "3600",  # rules of the firewall belong to all sessions on the machine
            "SANDFLEET_HOST_DRAIN_GRACE_S": "0",  # tests stop hosts in the middle of commands
            **self.env,
        }
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._with_names(),
                sys.executable,
                "-m",
                "sandfleet.fleet.host",
                env=env,
                stderr=log,
                stdout=asyncio.subprocess.PIPE,
            )
        await eventually(self.ready, what="the host is ready")

    def _with_names(self) -> list[str]:
        """What starts a program that sees another /etc/hosts."""
        if self.namespace is not None:
            return ["ip", "netns", "exec", self.namespace]
        if not self.names:
            return []
        file = self.folder / "hosts"
        file.write_text("".join(f"{address} {name}\n" for name, address in self.names.items()))
        script = f'mount --bind {file} /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh"]

    async def ready(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, self.log.read_text()[-3000:]
        try:
            return (await self.health())["database_age_s"] is not None
        except (aiohttp.ClientError, OSError):
            return False

    async def health(self) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(
                "http://host", connector=aiohttp.UnixConnector(str(self.socket))
            ) as session,
            session.get("/health") as response,
        ):
            answer: dict[str, Any] = await response.json()
            return answer

    async def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await self.process.wait()
        assert await self.process.stdout.read() == b"", "a daemon prints nothing on stdout"
        return self.process.returncode

    async def kill(self) -> None:
        """SIGKILL: it can keep nothing and tell nobody."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def new_run(self, *, tenant: str = "acme", user_id: str = "ada") -> RunKey:
        """A running run in the database."""
        key = RunKey(tenant, user_id, uuid.uuid4())
        async with await psycopg.AsyncConnection.connect(self.database_url, autocommit=True) as connection:
            await connection.execute(INSERT_RUN, (*key, uuid.uuid4(), uuid.uuid4()))
        return key

    async def set_status(self, key: RunKey, status: str) -> None:
        async with await psycopg.AsyncConnection.connect(self.database_url, autocommit=True) as connection:
            await connection.execute("update runs set status = %s where run_id = %s", (status, key.run_id))

    def token(self, fence: Fence, valid_s: float = 60.0) -> str:
        """A token for a fence; database and tests share a machine, so its clock will do."""
        return sign(self.secret, fence, time.time() + valid_s)

    def signer(self, fence: Fence) -> Callable[[], Awaitable[str]]:
        """Signs tokens for a fence."""

        async def sign_token() -> str:
            return self.token(fence)

        return sign_token

    async def sandbox(
        self, client: SandboxClient, *, key: RunKey | None = None, attempt: int = 1
    ) -> RunSandbox:
        """A run's sandbox, placed on this host."""
        fence = Fence(key or await self.new_run(), attempt)
        async with await psycopg.AsyncConnection.connect(self.database_url, autocommit=True) as connection:
            await connection.execute(PLACE, (*fence.key, self.host_id))
        return RunSandbox(fence, self.signer(fence), OneHost(client))

    def processes(self) -> list[psutil.Process]:
        """Everything below the host process: with bwrap, its sandboxes."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Memory that the host process itself has now."""
        assert self.process is not None
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
