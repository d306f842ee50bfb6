"""Two hosts that make sandboxes of different templates, and runs that ask for one, as executors place them."""

import uuid
from contextlib import asynccontextmanager

import psycopg
import pytest

from sandfleet.fleet.executor.placement import Placement
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.fleet.sandbox.run_sandbox import RunSandbox
from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Fence
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import read_templates

FILE = """
[templates.extra]
memory = "400MiB"

[templates.nowhere]
memory = "400MiB"
"""


@pytest.fixture
async def hosts(own_host, tmp_path):
    """One with the settings' template alone, and a smaller one that makes ``extra``, too."""
    file = tmp_path / "host.toml"
    file.write_text(FILE.partition("[templates.nowhere]")[0])
    listens = {"SANDFLEET_HOST_LISTEN": "127.0.0.1:0"}
    name = uuid.uuid4().hex[:8]
    unable = own_host("bwrap", SANDFLEET_HOST_ID=f"unable-{name}", **listens)
    able = own_host(
        "bwrap",
        SANDFLEET_HOST_ID=f"able-{name}",
        SANDFLEET_TEMPLATES=str(file),
        SANDFLEET_HOST_MEMORY_BYTES=str(2**30),
        **listens,
    )
    able.secret = unable.secret
    for host in (unable, able):
        await host.start()
    return unable, able


@asynccontextmanager
async def run_sandbox(host, tmp_path, template):
    """The sandbox of a run whose executor is on this host's machine."""
    file = tmp_path / "executor.toml"
    file.write_text(FILE)
    config = Settings(database_url=host.database_url, host_socket=host.socket, templates=file)
    fence = Fence(await host.new_run(), 1)
    async with await psycopg.AsyncConnection.connect(host.database_url, autocommit=True) as connection:
        await connection.execute("update runs set attempt = 1 where run_id = %s", (fence.key.run_id,))
    async with open_pool(host.database_url, 2) as pool:
        placement = Placement(config, pool, read_templates(config))
        sandbox = RunSandbox(fence, host.signer(fence), placement)
        sandbox.choose_template(template)
        yield sandbox
        await sandbox.close()
        await placement.aclose()


async def test_a_run_gets_its_sandbox_where_its_template_can_be_made(hosts, tmp_path):
    """Red when the nearest or the emptiest host is chosen, and its refusal is the model's problem."""
    unable = hosts[0]
    async with run_sandbox(unable, tmp_path, "extra") as sandbox:
        assert (await sandbox.exec("echo here")).stdout == b"here\n"
        assert [(await host.health())["sandboxes"] for host in hosts] == [0, 1]


async def test_a_host_that_offers_a_template_no_more_is_passed_by(hosts, tmp_path):
    """Red when only what hosts have told PostgreSQL counts: a host that has begun anew has told nothing yet."""
    unable = hosts[0]
    async with await psycopg.AsyncConnection.connect(unable.database_url, autocommit=True) as connection:
        await connection.execute(
            """create function more() returns trigger language plpgsql as $$ begin
                 new.templates := new.templates || '{"extra": {}}'; return new; end $$;
               create trigger more before insert or update on hosts for each row execute function more();
               update hosts set templates = templates"""
        )
    async with run_sandbox(unable, tmp_path, "extra") as sandbox:
        assert (await sandbox.exec("echo here")).stdout == b"here\n"
        assert [(await host.health())["sandboxes"] for host in hosts] == [0, 1]


async def test_if_no_host_makes_it_the_run_hears_why(hosts, tmp_path):
    """Red when it waits for room, which would help nobody."""
    async with run_sandbox(hosts[0], tmp_path, "nowhere") as sandbox:
        with pytest.raises(TemplateUnavailable, match="has no template 'nowhere'"):
            await sandbox.exec("true")
