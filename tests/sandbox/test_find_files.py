"""Looking for files: glob and grep, bounded in time and in what they answer."""

import asyncio

import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused
from tests.waiting import eventually

TREE = """
mkdir -p src/deep/er .hidden
echo 'import os' > src/a.py; echo 'print(1)' > src/deep/b.py; echo x > src/deep/er/c.PY
echo 'secret word' > .hidden/d.txt; touch 'src/[odd].py' "src/$(printf 'n\\377')"
ln -s /etc src/link; ln -s deep src/inner; mkfifo src/pipe
"""


async def names(sandbox, pattern, path="/workspace"):
    return [entry["name"] for entry in (await sandbox.files.glob(pattern, path)).items]


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("*.py", "src", ["[odd].py", "a.py", "deep/b.py"]),
        ("./*.py", "src", []),
        ("src/*.py", ".", ["src/[odd].py", "src/a.py"]),
        ("**/*.py", ".", ["src/[odd].py", "src/a.py", "src/deep/b.py"]),
        ("src/**/*.py", ".", ["src/[odd].py", "src/a.py", "src/deep/b.py"]),
        ("src/**/**/b.py", ".", ["src/deep/b.py"]),
        ("src/deep/**", ".", ["src/deep/b.py", "src/deep/er", "src/deep/er/c.PY"]),
        ("[!a].py", ".", ["src/deep/b.py"]),
        ("[a-b].p?", ".", ["src/a.py", "src/deep/b.py"]),
        ("[[]odd].py", ".", ["src/[odd].py"]),
        ("d.txt", ".", [".hidden/d.txt"]),
        ("passwd", ".", []),
        ("pi*", ".", ["src/pipe"]),
        ("*.[", ".", []),
    ],
)  # fmt: skip
async def test_a_pattern_finds_what_it_says(sandbox, pattern, path, found):
    """Red when ``*`` crosses a directory, ``**`` does not, or a link (to /etc, or into a loop) is followed."""
    await sandbox.exec(TREE)
    assert await names(sandbox, pattern, path) == found


async def test_a_glob_says_what_each_entry_is_and_that_there_is_more(sandbox):
    await sandbox.exec(TREE)
    found = await sandbox.files.glob("**", "src", limit=4)
    assert [(e["name"], e["kind"], e["size"]) for e in found.items] == [
        ("[odd].py", "file", 0), ("a.py", "file", 10), ("deep", "directory", found.items[2]["size"]),
        ("deep/b.py", "file", 9),
    ]  # fmt: skip
    assert (found.truncated, found.timed_out) == (True, False)


async def test_grep_names_file_line_and_text(sandbox):
    await sandbox.exec(TREE)
    await sandbox.write_file("long.txt", b"one\ntwo words\r\n" + b"x" * 10_000 + b"words\n\xff words")
    found = await sandbox.files.grep(r"w.rds?$")
    assert [(m["name"], m["line"], m["text"][:10]) for m in found.items] == [
        (".hidden/d.txt", 1, "secret wor"), ("long.txt", 2, "two words"), ("long.txt", 3, "x" * 10),
        ("long.txt", 4, "\ufffd words"),
    ]  # fmt: skip
    assert len(found.items[2]["text"]) == 500
    assert not found.truncated


async def test_grep_in_one_file_and_in_files_of_a_name(sandbox):
    await sandbox.exec(TREE)
    assert [m["name"] for m in (await sandbox.files.grep("import", "src/a.py")).items] == ["a.py"]
    assert [m["name"] for m in (await sandbox.files.grep("i", glob="*.py")).items] == [
        "src/a.py",
        "src/deep/b.py",
    ]
    assert [m["name"] for m in (await sandbox.files.grep("IMPORT", ignore_case=True)).items] == ["src/a.py"]
    assert [m["text"] for m in (await sandbox.files.grep("print(1)", fixed=True)).items] == ["print(1)"]
    assert (await sandbox.files.grep("print(1)")).items == []


async def test_grep_leaves_out_what_is_no_text(sandbox):
    """Red when a pipe is opened to block, or bytes of a program are taken for lines."""
    await sandbox.exec("mkfifo pipe; printf 'word\\0word' > binary; echo word > text; ln -s /etc/passwd link")
    assert [m["name"] for m in (await sandbox.files.grep("word|root")).items] == ["text"]


async def test_a_pattern_that_never_ends_ends_at_its_time_and_holds_up_nobody(sandbox):
    """Red when the expression runs in the agent: nothing else in the sandbox would be answered for ever."""
    await sandbox.write_file("early", b"aaab\n")
    await sandbox.write_file("evil", b"a" * 40 + b"\n")
    searching = asyncio.create_task(sandbox.files.grep("(a+)+b", timeout_s=5))
    async with asyncio.timeout(4):
        assert (await sandbox.exec("echo quick")).stdout == b"quick\n"
        assert (await sandbox.files.stat("evil"))["size"] == 41
    assert not searching.done()
    found = await searching
    assert (found.truncated, found.timed_out) == (True, True)
    assert (await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null | wc -l")).stdout < b"6"


async def test_a_search_that_nobody_waits_for_is_ended(sandbox):
    """Red when the forked process goes on after its caller has hung up."""
    await sandbox.write_file("evil", b"a" * 40 + b"\n")

    async def searches():
        result = await sandbox.exec(
            "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -cx '[/]run/sandfleet/agent'"
        )
        return int(result.stdout) - 1  # but for PID 1

    assert await searches() == 0
    searching = asyncio.create_task(sandbox.files.grep("(a+)+b", timeout_s=60))
    await eventually(searches, 60, "it searches")
    searching.cancel()
    await asyncio.gather(searching, return_exceptions=True)

    async def none():
        return await searches() == 0

    await eventually(none, 20, "it has ended")


async def test_a_time_limit_of_a_command_leaves_a_search_alone(sandbox):
    """Red when the forked process, an orphan without a mark by its looks, is taken for the command's."""
    await sandbox.write_file("evil", b"a" * 40 + b"\n")
    running = asyncio.create_task(sandbox.exec("sleep 300", timeout_s=3))
    found = await sandbox.files.grep("(a+)+b", timeout_s=6)
    assert (await running).timed_out
    assert found.timed_out


async def test_more_than_an_answer_may_hold_is_cut_off(sandbox):
    """Red when the agent bounds the number of findings alone: 27 MB of them break the host's limit, and the sandbox is lost."""
    await sandbox.exec("yes \"$(head -c 500 /dev/zero | tr '\\0' '\\1')\" | head -9000 > many")
    found = await sandbox.files.grep("\1", limit=10_000, timeout_s=60)
    assert (found.truncated, found.timed_out) == (True, False)
    assert 1000 < len(found.items) < 9000
    assert (await sandbox.exec("echo here")).stdout == b"here\n"


async def test_more_findings_than_fit_the_window_arrive(sandbox):
    """Red when the forked process's output is not windowed: the host would end the sandbox."""
    await sandbox.exec("seq -f 'line %09.0f of a text that is somewhat longer' 9000 > many")
    found = await sandbox.files.grep("line", limit=10_000)
    assert [m["line"] for m in found.items] == list(range(1, 9001))
    assert (await sandbox.files.grep("line", limit=7)).truncated


@pytest.mark.parametrize("pattern", ["(", "[", "(?P<a>x)(?P<a>y)", "a{99999999999}"])
async def test_what_is_no_expression_is_refused(sandbox, pattern):
    with pytest.raises(OperationRefused) as refused:
        await sandbox.files.grep(pattern)
    assert refused.value.code == "bad_pattern"


@pytest.mark.parametrize(
    ("path", "code"), [("missing", "not_found"), ("/etc", "outside"), ("link", "outside")]
)
async def test_a_search_begins_inside(sandbox, path, code):
    await sandbox.exec("ln -s /etc link")
    for attempt in (sandbox.files.glob("*", path), sandbox.files.grep("x", path)):
        with pytest.raises(OperationRefused) as refused:
            await attempt
        assert refused.value.code == code


async def test_a_lack_of_processes_is_said(sandbox):
    """Red when a failed fork ends the agent."""
    filling = await sandbox.processes.start("while sleep 1000 & do :; done 2>/dev/null")
    last = None
    for _ in range(2000):
        try:
            await sandbox.files.glob("*")
        except OperationRefused as refused:
            last = refused
            break
    assert last is not None
    assert last.code == "cannot_start"
    await sandbox.processes.kill(filling.process)
    assert await names(sandbox, "*") == []
