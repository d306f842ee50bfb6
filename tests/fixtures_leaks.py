"""The check that no test leaves anything behind."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from sandfleet.shared.settings import Settings
from tests import leaks
from tests.fixtures_servers import TestServers

# Pools of a module's own, opened by its tests, beside those of one test.
_MODULE_CONNECTIONS = 60


@pytest.fixture(autouse=True)
async def nothing_left_behind(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a test that leaves a container, network, process, immortal Redis key or open transaction behind."""
    names = set(request.fixturenames)
    if not names & {"servers", "stack", "engine"}:
        yield
        return
    servers: TestServers | None = request.getfixturevalue("servers") if "servers" in names else None
    stack = request.getfixturevalue("stack") if "stack" in names else None
    engine: str | None = request.getfixturevalue("engine") if "engine" in names else None
    before = leaks.descendants()
    traces = await asyncio.to_thread(leaks.network_traces, engine) if engine is not None else set()
    yield
    if engine is not None:
        await leaks.check_networks(engine, traces)
    supervisors = [each.supervisor for each in (servers, stack) if each is not None]
    await leaks.check_processes(supervisors, before)
    if servers is not None:
        await leaks.check_redis(servers.at.redis_url)
        await leaks.check_connections(servers.admin_url, _MODULE_CONNECTIONS)
    if stack is not None:
        await leaks.check_containers(stack)
        await leaks.check_redis(stack.info.redis_url)
        await leaks.check_connections(stack.info.database_url, _most_connections(stack.apis, stack.executors))


def _most_connections(apis: int, executors: int) -> int:
    """The sum of all pools at their limits; 6 more for an executor's control loop, its operations and its ledger."""
    pools = Settings.model_fields
    api = int(pools["api_pool_size"].default)
    executor = int(pools["executor_pool_size"].default)
    return apis * api + executors * (executor + 6) + 4
