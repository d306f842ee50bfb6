"""All invariants of one deployment: PostgreSQL, Redis, SQS and, where it can be reached, the Docker Engine."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from psycopg import AsyncConnection
from redis.asyncio import Redis

from sandfleet.localstack import dev_file
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.sandbox_leftovers import check_sandboxes
from sandfleet.shared.invariants import Violation
from sandfleet.shared.invariants.queues import check_queues
from sandfleet.shared.invariants.redis_keys import check_keys
from sandfleet.shared.invariants.runs import NEWEST, check_runs
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings


@dataclass
class Report:
    """What was found: violations, and how much of each kind was looked at."""

    violations: list[Violation]
    looked_at: dict[str, int] = field(default_factory=dict)


def settings_of(info: StackInfo) -> Settings:
    """The settings that reach this stack's servers."""
    return Settings(
        database_url=info.database_url,
        redis_url=info.redis_url,
        aws_endpoint_url=info.aws_endpoint_url,
        queue_urls=info.queue_urls,
    )


def find_deployment(root: Path) -> tuple[Settings, str | None, str]:
    """Settings, engine and container label of the deployment that the environment names (``SANDFLEET_DATABASE_URL`` or
    ``DATABASE_URL``), else of the stack that runs in ``root``."""
    if os.environ.get("SANDFLEET_DATABASE_URL") or os.environ.get("DATABASE_URL"):
        return Settings(), os.environ.get("DOCKER_HOST"), "sandfleet=1"  # type: ignore[call-arg, unused-ignore]
    info = dev_file.read(root / "dev.json")
    return settings_of(info), info.docker_host, f"{LABEL}={info.instance}"


async def check_stack(info: StackInfo, newest: int | None = None) -> Report:
    """Check a running local stack, down to its oldest run by default."""
    return await check(settings_of(info), info.docker_host, f"{LABEL}={info.instance}", newest)


async def check(
    settings: Settings, docker_host: str | None, label: str, newest: int | None = NEWEST
) -> Report:
    """Check a deployment. ``docker_host`` is an engine whose containers with ``label`` are its sandboxes; ``newest``
    bounds the ended runs that are looked at (None: all). Raises what a server's client raises when it does not answer.
    """
    async with (
        await AsyncConnection.connect(
            settings.database_url, autocommit=True, connect_timeout=10
        ) as connection,
        Redis.from_url(settings.redis_url) as redis,
    ):
        runs = await check_runs(connection, newest)
        report = Report(runs.violations, {"live runs": runs.live, "ended runs": runs.ended})
        keys, report.looked_at["Redis keys"] = await check_keys(redis)
        permits = Permits(settings)
        try:
            queues, report.looked_at["permits"] = await check_queues(permits, runs.ready)
        finally:
            await permits.aclose()
        report.violations += keys + queues
        if docker_host is not None:
            found, report.looked_at["sandboxes"] = await check_sandboxes(connection, docker_host, label)
            report.violations += found
    return report
