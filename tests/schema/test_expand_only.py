"""Each revision of the schema only adds to the one before it, so that executors, APIs and hosts of older versions run on."""

import asyncio
import hashlib
import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql

from sandfleet.localstack.servers import database_url
from sandfleet.shared.db import migrate
from tests.fixtures_servers import TestServers
from tests.schema.promises import Schema, breaks, read_schema

VERSIONS = Path(migrate.__file__).parent / "versions"

ACCEPTED = {
    "new: trigger name_writer on checkpoint_writes": "fills in, for executors that do not know the column, which run writes",
    "new: trigger keep_replaced on checkpoint_writes": "copies the row that is replaced; refuses nothing",
    "new: trigger keep_replaced on state_snapshots": "copies the row that is replaced; refuses nothing",
}
"""What looks like a break and is none, with the reason. tests/gates/test_undoing.py writes as an older executor does."""

RELEASED = {
    "0001": "8168ee4c072ba4b0fb6a3de0dde72f6e2297278b821e7bac4f77b2aa9efb28fd",
    "0002": "d315fc33130117b9ae932c970c8652f2d95221e667b14d56cace6f2bba3a1db4",
    "0003": "d38a5c5c52db7aea82ad3c3b9dc33ecdd3c40aaad0874241fea8a627c8d15019",
    "0004": "7f30f6b4c61d2d08b062aba79dfb4fd7ed9e4a889bb39661a9c005506f4fb17c",
    "0005": "320e296f918d58c7cabe24bb7d7df7697d97e31a6bfe00628cfcc048d5b02f29",
    "0006": "9ef9940700efebbfbbdef26ac571c6daa230b2582b65793e545d468983c0c55f",
    "0007": "535e720446a6ba1030da868ada74b085c4e58ba252e82014b87c730a6336d1ec",
    "0008": "af17956772f420c1de1e0fb6e07135d501447c28fe5d180370a724ca52fdbd73",
    "0009": "f4c3efb7462e8cebc3440b9355b8125ca818b27d5eb50f1862d5b3478040d197",
    "0010": "5ed2dde3148aa623a2f84e9072fec31b39084ea96310bdde24df0326bcc75f93",
    "0011": "b8016a8ec3a4f11ff6e1521da2f92ce6da7837906467ccc4b2d196911d0b04ad",
}
"""SHA-256 of the files of each released revision."""


def revisions() -> list[str]:
    config = Config()
    config.set_main_option("script_location", str(VERSIONS.parent))
    return [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()][::-1]


@pytest.fixture(scope="module")
async def walked(servers: TestServers) -> AsyncIterator[tuple[str, dict[str, Schema]]]:
    """URL of a database with the newest schema, and the schema after each revision, oldest first."""
    name = f"test_{uuid.uuid4().hex}"
    url = database_url(servers.admin_url, name)
    async with await psycopg.AsyncConnection.connect(servers.admin_url, autocommit=True) as admin:
        await admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    schemas = {}
    for revision in revisions():
        await asyncio.to_thread(migrate.upgrade, url, revision)
        async with await psycopg.AsyncConnection.connect(url) as connection:
            schemas[revision] = await read_schema(connection)
    yield url, schemas
    await servers.drop_database(url)


def test_every_revision_keeps_what_older_processes_use(walked: tuple[str, dict[str, Schema]]) -> None:
    """Against all revisions before it. Red when one takes a table, column or function away or changes its type, asks for a
    column that older versions do not fill, refuses what they write, or makes their calls ambiguous; and when an accepted
    one is no longer there."""
    _, schemas = walked
    assert len(schemas) > 9
    found = {
        (broken, after)
        for before, after in itertools.combinations(schemas, 2)
        for broken in breaks(schemas[before], schemas[after])
    }
    assert {(broken, after) for broken, after in found if broken not in ACCEPTED} == set()
    assert {broken for broken, _ in found} == set(ACCEPTED)


BREAKS = {
    "drop table turns": "gone: table turns",
    "alter table runs rename partial to rest": "gone: column runs.partial json",
    "alter table runs alter deaths type bigint": "gone: column runs.deaths integer",
    "alter table runs alter partial set not null": "gone: null in runs.partial",
    "alter table runs alter deaths drop default": "gone: an insert into runs without deaths",
    "alter table assistants add column much int not null": "new: assistants.much in each insert",
    "alter table runs add check (attempt < 9)": "new: runs: CHECK ((attempt < 9))",
    "alter table runs add foreign key (pool) references graphs": "new: runs: FOREIGN KEY (pool) REFERENCES graphs(graph_id)",
    "create unique index on runs (seq)": "new: unique runs USING btree (seq)",
    "alter table turns drop constraint turns_pkey": "gone: unique turns USING btree (name)",
    "drop function holds_suspect": "gone: function holds_suspect(text, integer) returns boolean",
    "create function holds_suspect(a text, b bigint) returns boolean return true": "new: function holds_suspect twice for 2 arguments",
    "create function holds_suspect(a text, b int, c int default 1) returns boolean return true": "new: function holds_suspect twice for 2 arguments",
    "create trigger t before insert on runs for each row execute function name_writer()": "new: trigger t on runs",
    "alter table turns add column much int not null default 1, add column more int check (more > 0)": None,
    "create table more (one int primary key check (one > 0))": None,
}
"""What a revision must not do, and what that breaks. None: it may."""


async def test_what_breaks_older_processes_is_seen(walked: tuple[str, dict[str, Schema]]) -> None:
    """Each by itself, undone afterwards. Red when the comparison is blind to one, or sees more than there is."""
    url, schemas = walked
    newest = list(schemas.values())[-1]
    async with await psycopg.AsyncConnection.connect(url) as connection:
        for statement, broken in BREAKS.items():
            await connection.execute(statement.encode())
            found = breaks(newest, await read_schema(connection))
            await connection.rollback()
            assert broken in found if broken is not None else not found, (statement, found)


def test_released_revisions_stay_as_they_are() -> None:
    """A database that has one does not run it again, so what is changed there reaches new databases alone. Red when a file of
    a released revision is changed, or lacks a place here though later ones have one."""
    found = {}
    for revision in revisions()[: len(RELEASED)]:
        digest = hashlib.sha256()
        for file in sorted(VERSIONS.glob(f"{revision}_*.[ps][yq]*")):
            digest.update(file.read_bytes())
        found[revision] = digest.hexdigest()
    assert found == RELEASED
