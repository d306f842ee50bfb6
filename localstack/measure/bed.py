"""A stack to measure on: sandboxes for runs that nobody executes, and the engine beside them."""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg

from sandfleet.fleet.host import labels
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.hosts import OneHost
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.stack import Stack
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.sandbox_token import sign

IMAGE = "sandfleet-sandbox:latest"
_TENANT = "measure"
_TOKEN_S = 600.0
_LOOK_S = 0.1
_INSERT_RUN = """
    insert into runs (tenant, user_id, run_id, thread_id, assistant_id, graph_id, kind, pool, class, status,
                      multitask_strategy, timeout_s, kwargs, metadata)
    values (%s, %s, %s, %s, %s, 'measure', 'run', 'default', 0, 'running', 'reject', 86400, '{}', '{}')
"""


class Bed:
    """Sandboxes by the way that executors go, the host's socket, and calls to its engine."""

    def __init__(self, stack: Stack, engine: Engine, connection: psycopg.AsyncConnection) -> None:
        self.stack = stack
        self.engine = engine
        self._connection = connection
        self._client = SandboxClient(Path(stack.info.host_socket))

    async def sandbox(self, template: str) -> RunSandbox:
        """One that comes with its first use, of a new run."""
        key = RunKey(_TENANT, _TENANT, uuid.uuid4())
        await self._connection.execute(_INSERT_RUN, (*key, uuid.uuid4(), uuid.uuid4()))
        fence = Fence(key, 1)

        async def token() -> str:
            return sign(self.stack.host_secret, fence, time.time() + _TOKEN_S)

        sandbox = RunSandbox(fence, token, OneHost(self._client))
        sandbox.choose_template(template)
        return sandbox

    async def running(self) -> list[str]:
        """Ids of the containers of runs."""
        instance = f"{labels.INSTANCE}={self.stack.info.instance}"
        found = await self.engine.containers(instance, f"{labels.TEMPLATE}=cold")
        return [str(container["Id"]) for container in found]

    async def warm(self, number: int) -> None:
        """Wait until so many sandboxes are ready and frozen."""
        while (await self._client.health())["warm"] < number:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(_LOOK_S)

    async def close_all(self, sandboxes: Sequence[RunSandbox]) -> None:
        """Remove sandboxes, and wait until the host has."""
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        # A close that did not get through is nothing that anybody repeats: the host reaps what no run needs any more.
        await self._connection.execute("update runs set status = 'success' where tenant = %s", (_TENANT,))
        while (await self._client.health())["sandboxes"]:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(_LOOK_S)

    async def aclose(self) -> None:
        """Forget the runs."""
        await self._connection.execute("delete from runs where tenant = %s", (_TENANT,))
        await self._client.aclose()


@asynccontextmanager
async def bed(
    root: Path, project: Path, say: Callable[[str], None], templates: str = "", **env: str
) -> AsyncIterator[Bed]:
    """A stack with these templates (text of a ``sandfleet.toml``), stopped at the end. Raises LocalStackError without an
    engine."""
    file = await asyncio.to_thread(_written, root / "sandfleet.toml", templates)
    own = {"SANDFLEET_TEMPLATES": str(file), "SANDFLEET_WARM_REFILL_PER_S": "1000", **env}
    stack = Stack(root, project, sandbox="docker", env={**os.environ, **own}, say=say)
    try:
        info = await stack.start()
        if info.docker_host is None:
            raise LocalStackError("There is nothing to measure without a Docker Engine.")
        async with (
            Engine(info.docker_host) as engine,
            await psycopg.AsyncConnection.connect(info.database_url, autocommit=True) as connection,
        ):
            made = Bed(stack, engine, connection)
            try:
                yield made
            finally:
                await made.aclose()
    finally:
        await stack.stop()


def _written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that it takes."""
    start = time.monotonic()
    await work()
    return time.monotonic() - start
