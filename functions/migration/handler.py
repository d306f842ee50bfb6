"""Bring the schema to its newest revision: a custom resource of CloudFormation, called before new code serves.

It logs in as the database's administrator, whose password RDS keeps, and sees to the role that all other processes log in
as, with tokens of IAM where there is IAM. It is in the network and may write, so it also makes a deployment's first API key.
"""

import asyncio
import json
import urllib.request
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
from psycopg import sql

from sandfleet.functions.lambda_logs import lambda_logger
from sandfleet.shared.aws_requests import read_secrets
from sandfleet.shared.db.migrate import upgrade
from sandfleet.shared.errors import InvalidRequest
from sandfleet.shared.ids import Owner
from sandfleet.shared.settings import settings
from sandfleet.shared.store.api_keys import create_key

ROLE = "sandfleet"

_configured = settings()
logger = lambda_logger("sandfleet-migration", _configured)


@logger.inject_lambda_context(clear_state=True)
def handler(event: dict[str, Any], _: Any) -> dict[str, Any]:
    """Entry point: an event of CloudFormation, which is answered at its ``ResponseURL``; without one, a call by hand.

    By hand, ``{"tenant": …, "user": …}`` makes an API key for that user, and ``{"api_key": …}`` is the only place where it
    is ever to be read. Raises InvalidRequest if one of the two is missing.

    Deleting the resource does nothing: data goes with the database.
    """
    if "RequestType" not in event and event.keys() & {"tenant", "user"}:
        return {"api_key": asyncio.run(_make_key(event))}
    answer: dict[str, Any] = {"Status": "SUCCESS"}
    try:
        if event.get("RequestType") != "Delete":
            _migrate()
    except Exception as error:
        logger.exception("the schema could not be migrated")
        answer = {"Status": "FAILED", "Reason": f"{type(error).__name__}: {error}"[:1000]}
        if "ResponseURL" not in event:
            raise
    if "ResponseURL" in event:
        _respond(event, answer)
    return answer


async def _make_key(event: dict[str, Any]) -> str:
    for field in ("tenant", "user"):
        if not isinstance(event.get(field), str) or not event[field]:
            raise InvalidRequest(f"{field}: give both tenant and user, as text")
    async with await psycopg.AsyncConnection.connect(_admin_url(), autocommit=True) as connection:
        key = await create_key(connection, Owner(event["tenant"], event["user"]), "by hand")
    logger.info("an API key was made")
    return key


def _admin_url() -> str:
    url = _configured.database_url
    if _configured.admin_secret_arn:
        login = read_secrets([_configured.admin_secret_arn], _configured.aws_region)
        at = urlsplit(url)
        netloc = f"{quote(login['username'], safe='')}:{quote(login['password'], safe='')}@{(at.hostname or '')}:{at.port}"
        url = urlunsplit(at._replace(netloc=netloc))
    return url


def _migrate() -> None:
    url = _admin_url()
    upgrade(url)
    if _configured.admin_secret_arn:
        with psycopg.connect(url, autocommit=True) as connection:
            _let_in(connection)
    logger.info("the schema is at its newest revision")


def _let_in(connection: psycopg.Connection[Any]) -> None:
    """The role of all other processes: it reads and writes rows, and owns nothing."""
    role = sql.Identifier(ROLE)
    if connection.execute("select 1 from pg_roles where rolname = %s", (ROLE,)).fetchone() is None:
        connection.execute(sql.SQL("create role {} login").format(role))
    for grant in (
        "grant rds_iam to {}",
        "grant pg_monitor to {}",
        "grant usage on schema public to {}",
        "grant select, insert, update, delete on all tables in schema public to {}",
        "grant usage, select, update on all sequences in schema public to {}",
    ):
        connection.execute(sql.SQL(grant).format(role))


def _respond(event: dict[str, Any], answer: dict[str, Any]) -> None:
    body = {
        **answer,
        "PhysicalResourceId": event.get("PhysicalResourceId", "sandfleet-schema"),
        **{key: event[key] for key in ("StackId", "RequestId", "LogicalResourceId")},
    }
    request = urllib.request.Request(  # noqa: S310
        event["ResponseURL"], json.dumps(body).encode(), {"content-type": ""}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310
        pass
