"""All invariants of one deployment: PostgreSQL, Redis, SQS and, where it can be reached, the Docker Engine."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psycopg
from botocore.exceptions import BotoCoreError, ClientError
from psycopg import AsyncConnection
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sandfleet.localstack import dev_file
from sandfleet.localstack.dev_file import StackInfo
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.sandbox_leftovers import check_sandboxes
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.invariants import Violation
from sandfleet.shared.invariants.queues import check_queues
from sandfleet.shared.invariants.redis_keys import check_keys
from sandfleet.shared.invariants.runs import NEWEST, check_runs
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings, read_settings

_LIMIT_S = 10
"""How long a part may keep its check waiting."""


class NotChecked(SandfleetError):
    """A part of the deployment does not answer, so its rules were not checked; the message names it."""

    code = "not_checked"
    status = 503


@dataclass
class Report:
    """What was found: violations, how much of each kind was looked at, and, a line for each, which parts did not answer."""

    violations: list[Violation]
    looked_at: dict[str, int] = field(default_factory=dict)
    not_checked: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def part(self, name: str, what: str) -> AsyncIterator[None]:
        """Note that a part does not answer, and go on with the next one. ``what`` of it the block checks."""
        try:
            yield
        except (psycopg.Error, RedisError, BotoCoreError, ClientError, httpx.HTTPError, OSError) as error:
            reason = str(error).strip().splitlines()
            self.not_checked.append(
                f"{name} does not answer ({type(error).__name__}{f': {reason[0]}' if reason else ''}): {what} were not"
                " checked"
            )


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
        return read_settings(), os.environ.get("DOCKER_HOST"), "sandfleet=1"
    info = dev_file.read(root / "dev.json")
    return settings_of(info), info.docker_host, f"{LABEL}={info.instance}"


async def check_stack(info: StackInfo, newest: int | None = None) -> Report:
    """Check a running local stack, down to its oldest run by default. Raises NotChecked if a part of it does not answer."""
    report = await check(settings_of(info), info.docker_host, f"{LABEL}={info.instance}", newest)
    if report.not_checked:
        raise NotChecked("; ".join(report.not_checked))
    return report


async def check(
    settings: Settings, docker_host: str | None, label: str, newest: int | None = NEWEST
) -> Report:
    """Check a deployment, as far as its parts answer. ``docker_host`` is an engine whose containers with ``label`` are its
    sandboxes (None: what hosts say of themselves must do); ``newest`` bounds the ended runs that are looked at (None: all)."""
    report = Report([])
    ready: dict[str, int] | None = None
    async with (
        report.part("PostgreSQL", "runs, the queues and the sandboxes"),
        await AsyncConnection.connect(
            settings.database_url, autocommit=True, connect_timeout=_LIMIT_S
        ) as connection,
    ):
        runs = await check_runs(connection, newest)
        ready = runs.ready
        report.violations += runs.violations
        report.looked_at |= {"live runs": runs.live, "ended runs": runs.ended}
        if docker_host is not None:
            async with report.part("The Docker Engine", "the sandboxes"):
                found, report.looked_at["sandboxes"] = await check_sandboxes(connection, docker_host, label)
                report.violations += found
    async with (
        report.part("Redis", "its keys"),
        Redis.from_url(settings.redis_url, socket_timeout=_LIMIT_S, socket_connect_timeout=_LIMIT_S) as redis,
    ):
        found, report.looked_at["Redis keys"] = await check_keys(redis)
        report.violations += found
    if ready is not None:
        permits = Permits(settings)
        try:
            async with report.part("SQS", "the permits"), asyncio.timeout(_LIMIT_S):
                found, report.looked_at["permits"] = await check_queues(permits, ready)
                report.violations += found
        finally:
            await permits.aclose()
    return report
