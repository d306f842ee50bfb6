"""The emulator of AWS that tests use: MiniStack, or LocalStack with ``--emulator=localstack`` (`make test-localstack`).

Tests that LocalStack must pass, too, carry the mark `emulators`; nothing in them knows which of the two it talks to.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sandfleet.localstack.ministack import start_ministack
from tests.fixtures_servers import TestServers, open_supervisor

REGION = "us-east-1"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which emulator."""
    parser.addoption(
        "--emulator",
        choices=("ministack", "localstack"),
        default="ministack",
        help="emulator of AWS; localstack is for tests marked `emulators` and needs `make install-localstack`",
    )


@asynccontextmanager
async def emulator_with(services: str, config: pytest.Config, servers: TestServers) -> AsyncIterator[str]:
    """Endpoint of an emulator that has ``services`` (MiniStack's names, with commas): a MiniStack of its own, or the
    session's LocalStack."""
    if config.getoption("emulator") == "localstack":
        yield servers.aws_endpoint_url
        return

    async def nothing(_: str) -> None: ...

    supervisor = await open_supervisor("emulator")
    try:
        yield await start_ministack(supervisor, REGION, nothing, services)
    finally:
        await supervisor.close()
