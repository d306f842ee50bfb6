"""A real Docker Engine for tests: one that answers, or one that is started here, for all processes of the session."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from sandfleet.fleet.host.base_image import ensure_image
from sandfleet.localstack.engine import choose_sandboxing, ensure_bwrap, ensure_nft
from sandfleet.localstack.supervisor import Supervisor
from tests.fixtures_servers import ROOT, open_supervisor

IMAGE = "sandfleet-sandbox:latest"
_RUNNER = pytest.StashKey[tuple[asyncio.Runner, Supervisor]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before other processes are started to run tests: start the engine that all of them use."""
    config = session.config
    if (
        not config.getoption("numprocesses", None)
        or hasattr(config, "workerinput")
        or config.option.collectonly
    ):
        return
    runner = asyncio.Runner()
    supervisor = runner.run(open_supervisor("engine"))
    config.stash[_RUNNER] = runner, supervisor
    os.environ["DOCKER_HOST"] = runner.run(_prepare(supervisor))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the engine that was started for several processes."""
    if _RUNNER in config.stash:
        runner, supervisor = config.stash[_RUNNER]
        runner.run(supervisor.close())
        runner.close()


@pytest.fixture(scope="session")
async def engine() -> AsyncIterator[str]:
    """Address (``DOCKER_HOST``) of a Docker Engine that has the sandbox image; started here if none answers.

    bwrap is there too, for the tests of the other backend, and nftables, for sandboxes with a network.
    """
    supervisor = await open_supervisor("engine")
    try:
        yield await _prepare(supervisor)
    finally:
        await supervisor.close()


async def _prepare(supervisor: Supervisor) -> str:
    chosen = await choose_sandboxing(supervisor, "docker", ROOT.parent / "docker", os.environ, print)
    assert chosen.docker_host is not None
    await ensure_image(chosen.docker_host, IMAGE, on_progress=print)
    await ensure_bwrap(print)
    await ensure_nft(print)
    return chosen.docker_host
