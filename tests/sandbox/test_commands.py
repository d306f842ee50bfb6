"""Commands: what comes back, and when."""

import asyncio

import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused


async def test_a_command_returns_its_output_and_exit_code(sandbox):
    """Red when stdout and stderr are mixed, or a status is lost."""
    result = await sandbox.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out\n", b"err\n", 7, None)


async def test_a_signal_is_told_from_an_exit_code(sandbox):
    """Red when the wait status is not taken apart."""
    result = await sandbox.exec("kill -SEGV $$")
    assert (result.exit_code, result.signal) == (None, 11)


async def test_arguments_are_passed_without_a_shell(sandbox):
    """Red when a list is joined to a shell text."""
    result = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"])
    assert result.stdout == b"a b|$HOME|*|"


async def test_environment_and_directory_are_the_callers(sandbox):
    result = await sandbox.exec("echo $COLOUR $PWD", env={"COLOUR": "blue"}, cwd="/tmp")
    assert result.stdout == b"blue /tmp\n"


async def test_stdin_of_any_size_reaches_the_command(sandbox):
    """Red when stdin is not windowed (it would deadlock or break) or not closed (wc would wait for ever)."""
    data = bytes(range(256)) * 8192
    result = await sandbox.exec("cat | wc -c", stdin=data)
    assert result.stdout.strip() == str(len(data)).encode()


async def test_without_stdin_a_reader_sees_the_end_at_once(sandbox):
    result = await sandbox.exec("cat", timeout_s=120)
    assert (result.exit_code, result.timed_out) == (0, False)


async def test_a_command_that_does_not_read_its_stdin_ends(sandbox):
    """Red when unread stdin keeps the operation open."""
    result = await sandbox.exec("true", stdin=b"x" * 1_000_000, timeout_s=120)
    assert result.exit_code == 0


async def test_output_comes_while_the_command_runs(sandbox):
    """Red when output is held until the end: the second line waits for a file written after the first came."""
    first = asyncio.Event()
    running = asyncio.create_task(
        sandbox.exec(
            "echo one; until [ -e go ]; do sleep 0.02; done; echo two",
            on_output=lambda _stream, _data: first.set(),
            timeout_s=120,
        )
    )
    await asyncio.wait_for(first.wait(), 60)
    await sandbox.write_file("go", b"")
    assert (await running).stdout == b"one\ntwo\n"


async def test_output_that_is_no_text_arrives_as_it_is(sandbox):
    result = await sandbox.exec("printf '\\0\\377\\355\\240\\200'")
    assert result.stdout == b"\0\xff\xed\xa0\x80"


async def test_many_commands_run_at_once_over_one_connection(sandbox):
    """Red when commands queue behind each other: each waits for all of the others."""
    every = 16
    results = await asyncio.gather(
        *(
            sandbox.exec(
                f"touch at.{n}; until [ $(ls at.* | wc -l) = {every} ]; do sleep 0.05; done", timeout_s=60
            )
            for n in range(every)
        )
    )
    assert [r.exit_code for r in results] == [0] * every


async def test_too_much_output_is_counted_and_dropped_but_for_both_ends(sandbox):
    """Red when the limit blocks the command, or the drop goes unsaid."""
    result = await sandbox.exec("echo begin; head -c 100000000 /dev/zero; echo end", timeout_s=60)
    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout.startswith(b"begin\n")
    assert result.stdout.endswith(b"end\n")
    assert b"bytes of output dropped" in result.stdout
    assert len(result.stdout) < 1024 * 1024 + 10_000
    marker = len(result.stdout) - 1024 * 1024 - 4096
    assert result.dropped_bytes + len(result.stdout) - marker == 100_000_000 + len(b"begin\nend\n")


async def test_a_flood_on_one_stream_leaves_the_other_alone(sandbox):
    """Red when both streams share one budget: the error message after a flood would be lost."""
    result = await sandbox.exec("head -c 5000000 /dev/zero; seq 5000 >&2")
    assert result.stderr.split() == [b"%d" % n for n in range(1, 5001)]


@pytest.mark.parametrize("command", [["/no/such/program"], "echo \0", ["echo", "\ud800"], []])
async def test_a_command_that_cannot_start_is_refused_with_the_reason(sandbox, command):
    with pytest.raises(OperationRefused):
        await sandbox.exec(command)
    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_a_missing_directory_is_named(sandbox):
    with pytest.raises(OperationRefused, match="/no/where"):
        await sandbox.exec("true", cwd="/no/where")


async def test_commands_share_the_workspace_and_background_processes(sandbox):
    """Red when the tree of an ended command is killed: a server started in one command serves the next."""
    await sandbox.exec("(while true; do date > beat; sleep 0.05; done) & disown")
    assert (await sandbox.exec("rm -f beat; sleep 0.5; ls")).stdout == b"beat\n"
