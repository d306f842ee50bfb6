"""Changing what lies where, within the roots."""

import asyncio

import pytest

from sandfleet.fleet.sandbox.errors import OperationRefused


async def refused(call):
    with pytest.raises(OperationRefused) as raised:
        await call
    return raised.value.code


async def shown(sandbox, path="."):
    return (
        (await sandbox.exec(["find", path, "-mindepth", "1", "-printf", "%P %y %m\n"]))
        .stdout.decode()
        .splitlines()
    )


async def test_stat_tells_what_a_path_leads_to(sandbox):
    await sandbox.exec(
        "echo 123 > file; chmod 750 file; ln -s file link; mkdir folder; mkfifo pipe; ln -s gone dead"
    )
    for path in ("file", "link"):
        found = await sandbox.files.stat(path)
        assert (found["kind"], found["size"], found["mode"]) == ("file", 4, 0o750)
        assert found["modified_s"] > 0
    assert (await sandbox.files.stat("folder"))["kind"] == "directory"
    assert (await sandbox.files.stat("pipe"))["kind"] == "other"
    assert await refused(sandbox.files.stat("dead")) == "not_found"
    assert await refused(sandbox.files.stat("file/x")) == "not_a_directory"


async def test_appending_makes_the_file_and_keeps_what_is_there(sandbox):
    """Red when an append replaces the file, or appends at an offset: both ends of it would write over each other."""
    await sandbox.files.append("new/log", b"one\n")
    await asyncio.gather(*(sandbox.files.append("new/log", b"%d\n" % n * 1000) for n in range(8)))
    lines = (await sandbox.read_file("new/log")).splitlines()
    assert sorted(lines) == sorted([b"one"] + [b"%d" % n for n in range(8)] * 1000)
    assert await refused(sandbox.files.append("new", b"x")) == "is_a_directory"
    await sandbox.exec("mkfifo pipe")
    assert await refused(sandbox.files.append("pipe", b"x")) in ("not_a_file", "io_error")


async def test_directories_are_made_with_those_above(sandbox):
    await sandbox.files.make_directory("a/b/c")
    await sandbox.files.make_directory("/workspace/a/b")
    await sandbox.write_file("file", b"")
    assert await refused(sandbox.files.make_directory("file")) == "exists"
    assert await refused(sandbox.files.make_directory("file/x")) == "not_a_directory"
    assert await shown(sandbox, "a") == ["b d 755", "b/c d 755"]


async def test_moving_within_a_root_and_to_the_other(sandbox):
    """Red when a rename between two file systems is given up."""
    await sandbox.exec(
        "mkdir -p a/b; echo text > a/b/file; chmod 640 a/b/file; ln -s file a/b/link; mkfifo a/pipe"
    )
    await sandbox.files.move("a", "moved/here")
    assert await sandbox.read_file("moved/here/b/file") == b"text\n"
    await sandbox.files.move("moved/here", "/tmp/there")
    assert sorted(await shown(sandbox, "/tmp/there")) == ["b d 755", "b/file f 640", "b/link l 777"]
    assert await shown(sandbox) == ["moved d 755"]


async def test_copies_keep_links_and_permissions(sandbox):
    await sandbox.exec(
        "mkdir -p a/b; echo text > a/b/run; chmod 755 a/b/run; ln -s /etc/passwd a/link; chmod 500 a/b"
    )
    await sandbox.files.copy("a", "c")
    assert sorted(await shown(sandbox, "c")) == ["b d 700", "b/run f 755", "link l 777"]
    await sandbox.files.copy("a/b/run", "copy")
    assert await sandbox.read_file("copy") == await sandbox.read_file("a/b/run") == b"text\n"


async def test_what_exists_is_replaced_only_if_wanted(sandbox):
    await sandbox.exec("echo 1 > one; echo 2 > two; mkdir folder")
    for change in (sandbox.files.move, sandbox.files.copy):
        assert await refused(change("one", "two")) == "exists"
        assert await refused(change("one", "folder", replace=True)) == "is_a_directory"
        assert await refused(change("folder", "two", replace=True)) == "not_a_directory"
        assert await refused(change("folder", "folder/inside")) == "bad_path"
        assert await refused(change("missing", "x")) == "not_found"
    await sandbox.files.copy("one", "two", replace=True)
    assert await sandbox.read_file("two") == b"1\n"


async def test_removing_a_file_a_link_and_a_tree(sandbox):
    """Red when a link is followed: what it leads to would go in its place."""
    await sandbox.exec(
        "mkdir -p full/deep kept; echo x > full/deep/file; touch kept/file; ln -s ../kept full/link; ln -s kept link"
    )
    assert await refused(sandbox.files.remove("full")) == "not_empty"
    await sandbox.files.remove("link")
    await sandbox.files.remove("full", recursive=True)
    assert await shown(sandbox) == ["kept d 755", "kept/file f 644"]
    assert await refused(sandbox.files.remove("gone")) == "not_found"


async def test_a_link_to_the_outside_can_be_removed_and_moved_itself(sandbox):
    await sandbox.exec("ln -s /etc/passwd link")
    await sandbox.files.move("link", "moved")
    await sandbox.files.remove("moved")
    assert await shown(sandbox) == []


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "link/x", "/", "/workspace", "/tmp", "x/../../y", "/workspace/../workspace"]
)
async def test_nothing_outside_is_touched_nor_a_root_itself(sandbox, path):
    """Red when links above the last name are not resolved before the check."""
    await sandbox.exec("ln -s /etc link; echo 1 > file")
    assert await refused(sandbox.files.remove(path, recursive=True)) == "outside"
    assert await refused(sandbox.files.move("file", path, replace=True)) == "outside"
    assert await refused(sandbox.files.copy(path, "there")) == "outside"
    assert await sandbox.read_file("file") == b"1\n"


async def test_a_big_tree_is_removed_while_others_are_served(sandbox):
    """Red when the agent itself walks the tree: commands would wait for it."""
    await sandbox.exec(["python3", "-c", "import os\nfor i in range(200):\n os.mkdir(f'd{i}')\n"
                        " for j in range(100): open(f'd{i}/f{j}', 'w').close()\nos.mkdir('t')\n"
                        "for i in range(200): os.rename(f'd{i}', f't/d{i}')"], timeout_s=100)  # fmt: skip
    removing = asyncio.create_task(sandbox.files.remove("t", recursive=True))
    assert (await sandbox.exec("echo quick")).stdout == b"quick\n"
    await removing
    assert await shown(sandbox) == []


async def test_a_copy_that_does_not_fit_leaves_no_part(docker_sandbox):
    """Red when the half-written file stays: the workspace would be full of it."""
    await docker_sandbox.exec("head -c 200000000 /dev/zero > big")
    with pytest.raises(OperationRefused, match="No space"):
        await docker_sandbox.files.copy("big", "copy")
    assert await shown(docker_sandbox) == ["big f 644"]
