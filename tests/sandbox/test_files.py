"""Files go through the agent, stay inside the sandbox's writable folders, and are replaced as a whole."""

import asyncio

import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_001])
async def test_bytes_come_back_as_they_were_written(sandbox, size):
    data = bytes(i * 31 % 256 for i in range(min(size, 1000))) * (size // 1000 + 1)
    await sandbox.write_file("deep/er/file", data[:size])
    assert await sandbox.read_file("deep/er/file") == data[:size]
    assert (await sandbox.exec("stat -c %s deep/er/file")).stdout == f"{size}\n".encode()


async def test_a_part_of_a_file_can_be_read(sandbox):
    await sandbox.write_file("file", b"0123456789")
    assert await sandbox.read_file("/workspace/file", offset=3, limit=4) == b"3456"
    assert await sandbox.read_file("file", offset=50) == b""


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../etc/passwd", "/workspace/../etc/hostname", "link/passwd", "/proc/1/environ", "/"],
)
async def test_paths_outside_are_refused(sandbox, path):
    """Red when links are not resolved before the check: ``link`` leads to /etc."""
    await sandbox.exec("ln -s /etc link")
    for attempt in (sandbox.read_file(path), sandbox.write_file(path, b"x"), sandbox.list_files(path)):
        with pytest.raises(OperationRefused, match="outside") as refused:
            await attempt
        assert refused.value.code == "outside"


async def test_links_that_stay_inside_are_followed(sandbox):
    await sandbox.exec("mkdir real; ln -s real link; echo text > real/file")
    assert await sandbox.read_file("link/file") == b"text\n"


async def test_what_is_no_file_is_named(sandbox):
    """Red when a pipe is opened to block: the agent would hang, and with it the sandbox."""
    await sandbox.exec("mkfifo pipe; mkdir directory")
    for path, code in (("pipe", "not_a_file"), ("directory", "is_a_directory"), ("missing", "not_found")):
        with pytest.raises(OperationRefused) as refused:
            await sandbox.read_file(path)
        assert refused.value.code == code
    with pytest.raises(OperationRefused) as refused:
        await sandbox.write_file("directory", b"")
    assert refused.value.code == "is_a_directory"
    with pytest.raises(OperationRefused) as refused:
        await sandbox.list_files("missing")
    assert refused.value.code == "not_found"


async def test_a_listing_says_what_each_entry_is(sandbox):
    await sandbox.exec("mkdir b; echo 123 > a; ln -s a c; mkfifo d")
    found = await sandbox.list_files()
    assert [(e["name"], e["kind"]) for e in found["entries"]] == [
        ("a", "file"), ("b", "directory"), ("c", "symlink"), ("d", "other"),
    ]  # fmt: skip
    assert (found["entries"][0]["size"], found["truncated"]) == (4, False)


async def test_names_that_are_no_text_are_listed(sandbox):
    await sandbox.exec("touch \"$(printf 'a\\377b')\"")
    assert [e["name"] for e in (await sandbox.list_files())["entries"]] == ["a\ufffdb"]


async def test_a_huge_directory_is_listed_in_part(sandbox):
    await sandbox.exec(
        ["python3", "-c", "for i in range(10500): open(f'file-{i}-' + 'x' * 150, 'w').close()"]
    )
    found = await sandbox.list_files()
    assert (len(found["entries"]), found["truncated"]) == (10_000, True)


async def test_a_replaced_file_keeps_its_permissions(sandbox):
    await sandbox.exec("touch script; chmod 750 script")
    await sandbox.write_file("script", b"new")
    await sandbox.write_file("other", b"new", mode=0o711)
    assert (await sandbox.exec("stat -c %a script other")).stdout == b"750\n711\n"


async def test_a_write_that_fails_leaves_the_old_file(docker_sandbox):
    """Red when the target is opened for writing: it would be cut off before the disk is full."""
    await docker_sandbox.write_file("file", b"old")
    with pytest.raises(OperationRefused, match="No space"):
        await docker_sandbox.write_file("file", bytes(300_000_000))
    assert await docker_sandbox.read_file("file") == b"old"
    assert [e["name"] for e in (await docker_sandbox.list_files())["entries"]] == ["file"]


async def test_a_write_that_is_broken_off_leaves_nothing(sandbox, client):
    """Red when the agent keeps the half-written part: the caller hung up in the middle."""
    await sandbox.write_file("file", b"old")
    begun = asyncio.Event()

    async def endless():
        while True:
            yield b"x" * 1000
            begun.set()
            await asyncio.sleep(0.01)

    async def write():
        params = {"path": "file"}
        token = await sandbox._sign_token()
        async with client._answer("PUT", "/sandbox/file", token, params=params, data=endless()):
            pass

    writing = asyncio.create_task(write())
    await begun.wait()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    gone = await sandbox.exec('until [ "$(ls)" = file ]; do sleep 0.02; done', timeout_s=120)
    assert not gone.timed_out
    assert await sandbox.read_file("file") == b"old"


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "\ud800/file"])
async def test_impossible_paths_are_refused(sandbox, path):
    with pytest.raises(OperationRefused):
        await sandbox.read_file(path)
