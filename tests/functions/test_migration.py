"""The migration as CloudFormation calls it: each call is answered at the URL that it names, whatever happens, and deployments
may race."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from aiohttp import web

from sandfleet.localstack.process import free_port
from tests.functions.test_functions import invoke
from tests.schema.test_upgrade import released
from tests.waiting import eventually

__all__ = ["released"]

LOCK = 7_261_301  # of `shared/db/env.py`, which only Alembic can import


@dataclass
class CloudFormation:
    """Where answers are put, as at a presigned URL of S3."""

    url: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)
    types: list[str | None] = field(default_factory=list)

    def event(self, kind: str, **more: str) -> dict[str, str]:
        """What CloudFormation calls the function with."""
        ids = {"StackId": "arn:stack", "RequestId": "r-1", "LogicalResourceId": "Schema"}
        return {"RequestType": kind, "ResponseURL": self.url, **ids, **more}

    async def take(self, request: web.Request) -> web.Response:
        self.types.append(request.headers.get("content-type"))
        self.answers.append(json.loads(await request.read()))
        return web.Response()


@pytest.fixture
async def cloudformation() -> AsyncIterator[CloudFormation]:
    made, app = CloudFormation(), web.Application()
    app.router.add_put("/answer", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/answer"
    yield made
    await runner.cleanup()


def environment(database: str) -> dict[str, str]:
    return {"SANDFLEET_DATABASE_URL": database}


def unreachable() -> dict[str, str]:
    """A database that nobody answers at."""
    return environment(f"postgresql://admin:hunter2@127.0.0.1:{free_port()}/none?connect_timeout=2")


async def test_a_migration_that_fails_is_answered(cloudformation: CloudFormation) -> None:
    """With the reason, without the password, and with the ids that CloudFormation knows its request by. Red when the function
    fails instead: CloudFormation would wait for an hour, and then for the rollback's call."""
    answer, _, _ = await invoke(unreachable(), "migration", cloudformation.event("Update"))
    assert answer["Status"] == "FAILED"
    (said,) = cloudformation.answers
    assert (said["Status"], said["StackId"], said["RequestId"]) == ("FAILED", "arn:stack", "r-1")
    assert (said["LogicalResourceId"], said["PhysicalResourceId"]) == ("Schema", "sandfleet-schema")
    assert "refused" in said["Reason"]
    assert "hunter2" not in json.dumps(said)
    assert len(json.dumps(said)) < 4096  # more is refused
    assert cloudformation.types == [""]  # the URL is signed for no other


async def test_a_migration_that_succeeds_is_answered(cloudformation: CloudFormation, released: str) -> None:
    """By the id that the resource has. Red when an update answers with another one: CloudFormation would take the resource
    for replaced, and delete the old one."""
    event = cloudformation.event("Update", PhysicalResourceId="first")
    await invoke(environment(released), "migration", event)
    (said,) = cloudformation.answers
    assert (said["Status"], said["PhysicalResourceId"]) == ("SUCCESS", "first")
    assert "Reason" not in said
    assert await revision(released) > "0001"


async def test_a_stack_is_removed_without_its_database(cloudformation: CloudFormation) -> None:
    """Which may be gone before the resource. Red when a Delete migrates: the stack could not be removed."""
    await invoke(unreachable(), "migration", cloudformation.event("Delete"))
    assert [said["Status"] for said in cloudformation.answers] == ["SUCCESS"]


async def test_a_call_by_hand_fails_when_the_migration_does() -> None:
    """Nobody waits at a URL. Red when the failure is only told in an answer that a script does not read."""
    with pytest.raises(AssertionError):  # the function fails
        await invoke(unreachable(), "migration", {})


async def test_two_deployments_may_migrate_at_once(cloudformation: CloudFormation, released: str) -> None:
    """Both are held up until both have begun. Red without the lock: both make the same tables, and one deployment fails and is
    rolled back."""
    async with await psycopg.AsyncConnection.connect(released, autocommit=True) as connection:
        await connection.execute("select pg_advisory_lock(%s)", (LOCK,))
        calls = [
            asyncio.create_task(invoke(environment(released), "migration", cloudformation.event("Update")))
            for _ in range(2)
        ]

        async def both_wait() -> bool:
            waiting = await one(
                connection,
                """select count(*) from pg_locks where locktype = 'advisory' and not granted
                     and database = (select oid from pg_database where datname = current_database())""",
            )
            return waiting == (2,)

        await eventually(both_wait, 120, "two migrations that wait for each other")
        await connection.execute("select pg_advisory_unlock(%s)", (LOCK,))
        await asyncio.gather(*calls)
    assert [said["Status"] for said in cloudformation.answers] == ["SUCCESS", "SUCCESS"]
    assert await revision(released) > "0001"


async def one(connection: Any, statement: str) -> tuple[Any, ...]:
    row = await (await connection.execute(statement)).fetchone()
    assert row is not None
    return tuple(row)


async def revision(database: str) -> str:
    async with await psycopg.AsyncConnection.connect(database) as connection:
        return str((await one(connection, "select version_num from alembic_version"))[0])
