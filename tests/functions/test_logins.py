"""Tokens of IAM as PostgreSQL's passwords: libpq finds the newest one in a file, and no one else may read it."""

import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from sandfleet.shared import aws_requests
from sandfleet.shared.db import logins
from sandfleet.shared.settings import Settings
from tests.fixtures_servers import TestServers
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As a new one of AWS: with keys of its own, and without a token."""
    for name, value in {"_file": None, "_keeper": None, "_written_at": 0.0}.items():
        monkeypatch.setattr(logins, name, value)
    monkeypatch.setattr(logins.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PGPASSFILE", "/nowhere")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    aws_requests._session.cache_clear()
    yield
    aws_requests._session.cache_clear()


def of_role(servers: TestServers, role: str) -> Settings:
    """Of a deployment whose processes log in as ``role``."""
    at = urlsplit(servers.admin_url)
    return Settings(database_url=f"postgresql://{role}@127.0.0.1:{at.port}/postgres", database_iam=True)


def pass_file() -> Path:
    assert logins._file is not None
    return logins._file


def token(file: Path) -> str:
    """The password as it was before it was escaped."""
    escaped = file.read_text().strip().removeprefix("*:*:*:").split(":", 1)[1]
    return escaped.replace("\\:", ":").replace("\\\\", "\\")


async def test_libpq_logs_in_with_the_token_in_the_file(servers: TestServers) -> None:
    """Against a server that wants it. Red when the token's colons are not escaped, the role's line is another's, or the
    variable does not name the file."""
    role = f"r{uuid.uuid4().hex[:8]}"
    settings = of_role(servers, role)
    logins.refresh(settings)
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as admin:
        password = sql.Literal(token(pass_file()))
        await admin.execute(
            sql.SQL("create role {} login password {}").format(sql.Identifier(role), password)
        )
        async with await psycopg.AsyncConnection.connect(settings.database_url) as connection:
            row = await (await connection.execute("select current_user")).fetchone()
        await admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
    assert row == (role,)


async def test_nobody_else_reads_the_file(servers: TestServers) -> None:
    """Red when it is made with the rights that files have by default; libpq would not take it either."""
    logins.refresh(of_role(servers, "r"))
    assert stat.S_IMODE(pass_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(pass_file().parent.stat().st_mode) == 0o700


async def test_without_iam_nothing_is_written(servers: TestServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a deployment with a password asks for keys of AWS, which it may not have."""
    monkeypatch.setattr(logins, "login_token", None)
    settings = of_role(servers, "r").model_copy(update={"database_iam": False})
    logins.refresh(settings)
    logins.keep_fresh(settings)
    assert (logins._file, logins._keeper) == (None, None)


async def test_a_young_token_stays_and_an_old_one_is_replaced(servers: TestServers) -> None:
    """In one piece, by a new file: somebody may read it meanwhile. Red when each call of a Lambda signs a token, or one that
    stood still for long goes on with its old one."""
    settings = of_role(servers, "r")
    logins.refresh(settings)
    with pass_file().open() as first:  # so that its number is not given to another
        before = pass_file().stat().st_ino
        logins.refresh(settings)
        assert pass_file().stat().st_ino == before
        logins._written_at -= logins.RENEW_S
        logins.refresh(settings)
        assert pass_file().stat().st_ino != before
        assert first.read()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # how the test ends the thread
async def test_renewal_goes_on_after_a_failure(servers: TestServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an error ends the thread: the process could open no connection any more, a quarter of an hour later."""
    sign, signed = logins.login_token, []

    def failing_at_first(*given: Any) -> str:
        signed.append(given)
        if len(signed) == 2:
            raise OSError
        if len(signed) == 4:
            raise SystemExit  # the end of the thread, and of the test
        return sign(*given)

    monkeypatch.setattr(logins, "login_token", failing_at_first)
    monkeypatch.setattr(logins, "RENEW_S", 0.0)
    monkeypatch.setattr(logins, "_TRY_AGAIN_S", 0.0)
    logins.keep_fresh(of_role(servers, "r"))
    keeper = logins._keeper
    assert keeper is not None
    await eventually(lambda: not keeper.is_alive(), what="the thread's end")
    assert len(signed) == 4
