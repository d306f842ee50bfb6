"""The commands that use a running stack, as a person types them."""

import asyncio
import os
import re

import pytest

from tests.localstack.test_commands import COMMAND


@pytest.fixture
def sandfleet(stack):
    """Runs a command on the session's stack; gives its exit code and what it said."""
    env = {
        **os.environ,
        "SANDFLEET_API_URL": stack.info.api_url,
        "SANDFLEET_API_KEY": stack.info.api_key,
        "DATABASE_URL": stack.info.database_url,
    }

    async def run(*arguments):
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        return process.returncode, said.decode()

    return run


async def test_a_run_is_started_listed_and_watched(sandfleet):
    """Red when a command asks the API for what it does not have, or when `watch` shows less than `run` did."""
    code, said = await sandfleet("run", "Say hi", "--assistant", "messages")
    assert code == 0, said
    (run_id,) = re.findall(r"success  run (\S+)", said)
    assert "model    Hi!" in said
    code, listed = await sandfleet("runs", "--limit", "1")
    assert (code, run_id in listed) == (0, True), listed
    code, watched = await sandfleet("watch", run_id)
    assert code == 0, watched
    assert said.startswith(watched.removesuffix("success\n"))


async def test_usage_is_shown(sandfleet):
    """Red when the command and the tables differ, or a wrong day is taken for another one."""
    await sandfleet("run", "Say hi", "--assistant", "messages")
    code, said = await sandfleet("usage", "--by", "user", "--tenant", "local")
    assert code == 0, said
    assert re.search(r"^total +[1-9]", said, re.MULTILINE), said
    code, said = await sandfleet("usage", "--to", "2001-01-31")
    assert (code, said.strip()) == (0, "No model calls from 2001-01-02 to 2001-01-31.")
    code, said = await sandfleet("usage", "--from", "yesterday")
    assert (code, "Traceback" in said) == (2, False), said


async def test_a_run_that_fails_is_told_by_the_exit_code(sandfleet):
    """Red when a script cannot tell that its run has failed."""
    code, said = await sandfleet("run", "no such luck", "--assistant", "fails")
    assert (code, "error" in said) == (1, True), said


async def test_what_a_graph_asks_is_shown_and_answered(sandfleet):
    """With the very command that `run` prints. Red when a graph with a state of its own can be run only from Python."""
    code, said = await sandfleet("run", "--input", '{"question": "Buy?"}', "--assistant", "approve")
    assert code == 0, said
    assert "Buy?" in said
    (answer,) = re.findall(r"waits for an answer: sandfleet (run .*) --resume ANSWER", said)
    code, said = await sandfleet(*answer.split(), "--resume", "yes")
    assert (code, "waits" in said) == (0, False), said
    assert "step     ask" in said


async def test_a_graph_that_is_not_there_is_answered_with_those_that_are(sandfleet):
    """Also when nobody has named one and there is no `coder`. Red when the API is asked first, which cannot list them."""
    for words in ([], ["--assistant", "none"]):
        code, said = await sandfleet("run", "Say hi", *words)
        assert code == 1
        assert re.search(r"Name a graph with --assistant: .*approve, .*messages", said), said


async def test_a_run_is_cancelled(sandfleet, client):
    """Also one without a thread of the caller's. Red when only runs of visible threads are found."""
    run = await client.runs.create(None, "slow", input={"seconds": 600})
    code, said = await sandfleet("cancel", run["run_id"])
    assert (code, said.startswith("interrupted")) == (0, True), said
    code, said = await sandfleet("cancel", run["run_id"])
    assert (code, "Traceback" in said) == (1, False), said


async def test_the_doctor_finds_what_is_there(sandfleet):
    """Red when a check fails on a machine where everything works."""
    code, said = await sandfleet("doctor")
    assert code == 0, said
    assert re.findall(r"^(\w+) ", said, re.MULTILINE) == ["ok"] * 8, said


async def test_migrating_twice_changes_nothing(sandfleet):
    """Red when it fails on a database that has the newest schema."""
    assert await sandfleet("db", "migrate") == (0, "The database has the newest schema.\n")
