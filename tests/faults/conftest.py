"""One stack for all of these tests: each module breaks a part of it, mends it, and leaves it in order."""

from collections.abc import AsyncIterator

import pytest

from tests import leaks
from tests.faults.fleet import Fleet, open_fleet


@pytest.fixture(scope="session")
async def fleet(engine: str) -> AsyncIterator[Fleet]:
    async with open_fleet(engine, "faults", executors=2) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
async def left_in_order(fleet: Fleet) -> AsyncIterator[None]:
    """A run passes through before each module, and no invariant is broken after it."""
    await fleet.well()
    yield
    await fleet.in_order()


@pytest.fixture(autouse=True)
async def nothing_left_behind(fleet: Fleet) -> AsyncIterator[None]:
    """The check after each test, for a stack whose processes come and go."""
    before = leaks.descendants()
    yield
    await leaks.check_processes([fleet.stack.supervisor], before)
    await leaks.check_redis(fleet.stack.info.redis_url)
