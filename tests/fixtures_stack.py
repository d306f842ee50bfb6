"""The whole of sandfleet for tests: real servers, a real Docker Engine, the project in ``tests/projects/basic``."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from langgraph_sdk import get_client
from langgraph_sdk.client import LangGraphClient

from sandfleet.localstack.stack import Stack
from sandfleet.localstack.supervisor import AlreadyRunning
from tests.fixtures_servers import ROOT

PROJECT = Path(__file__).parent / "projects" / "basic" / "langgraph.json"
# A dead executor's run is taken over after a lease: shorter than in production, longer than this machine's hiccups.
SETTINGS = {"SANDFLEET_LEASE_S": "6", "SANDFLEET_RENEW_EVERY_S": "1.5", "SANDFLEET_DRAIN_GRACE_S": "5"}


async def start_stack(
    engine: str,
    kind: str,
    *,
    project: Path = PROJECT,
    executors: int = 1,
    apis: int = 1,
    restart: bool = False,
    **env: str,
) -> Stack:
    """A started stack with a folder of its own; the caller stops it. ``env`` overrides `SETTINGS`; with ``restart``
    processes that die come back."""
    number = 0
    while True:
        number += 1
        settings = {**SETTINGS, **env, "DOCKER_HOST": engine}
        for name in ("DATABASE_URL", "REDIS_URL", "AWS_ENDPOINT_URL", "SANDFLEET_MODEL"):
            settings.setdefault(name, "")
        stack = Stack(
            ROOT / f"{kind}-{number}",
            project,
            executors=executors,
            apis=apis,
            sandbox="docker",
            env=settings,
            restart=restart,
        )
        try:
            await stack.start()
        except AlreadyRunning:
            await stack.stop()
            continue
        except BaseException:
            await stack.stop()
            raise
        return stack


@pytest.fixture(scope="session")
async def stack(engine: str) -> AsyncIterator[Stack]:
    """One API, two executors and a sandbox host, shared by all tests. A test that kills a process restarts it."""
    started = await start_stack(engine, "stack", executors=2)
    yield started
    removed = await started.stop()
    assert removed == [], f"had to be removed by force: {removed}"


@pytest.fixture(scope="session")
async def client(stack: Stack) -> AsyncIterator[LangGraphClient]:
    """An unmodified ``langgraph-sdk`` client of the stack's first user."""
    async with AsyncExitStack() as exits:
        yield await exits.enter_async_context(get_client(url=stack.info.api_url, api_key=stack.info.api_key))
