"""Sandbox hosts on both backends, and the check that a test leaves no sandbox behind."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sandfleet.fleet.host import firewall
from sandfleet.fleet.host.engine import Engine
from sandfleet.fleet.host.firewall import FirewallError
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.localstack import docker_api
from sandfleet.localstack.bucket import create_bucket
from sandfleet.shared.ids import RunKey
from tests.fixtures_servers import TestServers
from tests.sandbox.host_process import Host
from tests.waiting import eventually

MakeHost = Callable[..., Host]


async def containers(host: Host) -> list[dict[str, object]]:
    """Containers of a host's instance, in any state."""
    async with Engine(host.docker_host) as engine:
        return await engine.containers("sandfleet=1", f"sandfleet.instance={host.instance}")


async def bucket_env(servers: TestServers) -> dict[str, str]:
    """Settings of a host that keeps snapshots, in a new bucket."""
    at = servers.at
    name = f"test-{uuid.uuid4().hex[:12]}"
    return {
        "AWS_ENDPOINT_URL": at.aws_endpoint_url,
        "SANDFLEET_SNAPSHOT_BUCKET": await create_bucket(at.aws_endpoint_url, at.aws_region, {}, name),
    }


async def uninstalled() -> None:
    """Remove the rules of the firewall unless other sessions on this machine use them."""
    with suppress(FirewallError):
        await firewall.uninstall()


async def check_empty(host: Host) -> None:
    """No container, process or folder of a sandbox is left."""
    if host.backend == "docker":

        async def no_container() -> bool:
            return not await containers(host)

        async def no_network() -> bool:
            label = f"sandfleet.instance={host.instance}"
            return not await asyncio.to_thread(docker_api.labelled, host.docker_host, label)

        await eventually(no_container, what="no container left")
        await eventually(no_network, what="no network left")
    await eventually(lambda: not host.processes(), what="no process left")
    folder = host.folder / "host" / "sandboxes"
    await eventually(lambda: not folder.exists() or not any(folder.iterdir()), what="no folder left")


@pytest.fixture(scope="session")
async def shared_hosts(
    servers: TestServers, engine: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Host]]:
    """One host per backend for all tests that do not stop it or change its settings."""
    database_url = await servers.create_database()
    hosts = {
        backend: Host(
            tmp_path_factory.mktemp(backend), database_url, backend, engine, await bucket_env(servers)
        )
        for backend in ("docker", "bwrap")
    }
    for host in hosts.values():
        await host.start()
    yield hosts
    for host in hosts.values():
        assert await host.stop() == 0
    await servers.drop_database(database_url)


@pytest.fixture(params=["docker", "bwrap"])
async def host(request: pytest.FixtureRequest, shared_hosts: dict[str, Host]) -> AsyncIterator[Host]:
    """A host of either backend; the test must leave no sandbox on it."""
    chosen = shared_hosts[request.param]
    yield chosen
    await check_empty(chosen)


@pytest.fixture
async def docker_host(shared_hosts: dict[str, Host]) -> AsyncIterator[Host]:
    """The Docker host, for what bwrap does not promise."""
    yield shared_hosts["docker"]
    await check_empty(shared_hosts["docker"])


@pytest.fixture
async def own_host(servers: TestServers, engine: str, tmp_path: Path) -> AsyncIterator[MakeHost]:
    """Makes hosts that the test may stop, kill and configure; not yet started."""
    database_url = await servers.create_database()
    made: list[Host] = []

    def make(backend: str = "docker", **env: str) -> Host:
        host = Host(tmp_path / str(len(made)), database_url, backend, engine, env)
        made.append(host)
        return host

    yield make
    for host in made:
        if host.process is not None:
            await host.stop()
        await check_empty(host)
    await servers.drop_database(database_url)


@pytest.fixture
async def client(host: Host) -> AsyncIterator[SandboxClient]:
    """A client of the parametrized host."""
    made = SandboxClient(host.socket)
    yield made
    await made.aclose()


@pytest.fixture
async def sandbox(host: Host, client: SandboxClient) -> AsyncIterator[RunSandbox]:
    """The sandbox of a new run, removed after the test."""
    made = await host.sandbox(client)
    yield made
    await made.close()


@pytest.fixture
async def docker_client(docker_host: Host) -> AsyncIterator[SandboxClient]:
    made = SandboxClient(docker_host.socket)
    yield made
    await made.aclose()


@pytest.fixture
async def docker_sandbox(docker_host: Host, docker_client: SandboxClient) -> AsyncIterator[RunSandbox]:
    made = await docker_host.sandbox(docker_client)
    yield made
    await made.close()


@pytest.fixture
def nothing_to_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in the test's process has no PostgreSQL that would know of snapshots or losses."""

    async def nothing(_snapshots: Snapshots, _key: RunKey) -> tuple[None, None]:
        return None, None

    monkeypatch.setattr(Snapshots, "find", nothing)
