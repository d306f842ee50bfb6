"""The program that packs and unpacks a workspace, run as the sandbox runs it: with an interpreter of its own."""

import errno
import io
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandfleet.fleet.sandbox_agent import archive


def run(*arguments, stdin=b""):
    ended = subprocess.run(
        [sys.executable, "-I", "-S", archive.__file__, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=True,
    )
    return ended.stdout, json.loads(ended.stderr.splitlines()[-1])


def content(folder):
    """Each path below a folder with its kind, permissions, time, and content or target."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if path.is_symlink():
            found[str(path.relative_to(folder))] = ("link", os.readlink(path))
        elif path.is_dir():
            found[str(path.relative_to(folder))] = ("folder", mode, status.st_mtime_ns)
        else:
            found[str(path.relative_to(folder))] = ("file", mode, status.st_mtime_ns, path.read_bytes())
    return found


def age(folder):
    """Let all of a folder be from the year 2001: a tar keeps microseconds, a file system more."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (10**9, 10**9), follow_symlinks=False)


def test_a_workspace_comes_back_as_it_was(tmp_path):
    """Red without the modes of folders being set last: nothing could be put into one that is read-only."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "deep" / "er").mkdir(parents=True)
    new.mkdir()
    (old / "empty").write_bytes(b"")
    (old / "deep" / "program").write_bytes(b"#!/bin/sh\n")
    (old / "deep" / "program").chmod(0o750)
    (old / "deep" / "er" / ("n" * 200)).write_bytes(os.urandom(300_000))
    (old / "na\u00efve \u2603\n").write_bytes(b"name")
    (old / "outside").symlink_to("/etc/passwd")
    (old / "dangling").symlink_to("nowhere")
    (old / "deep" / "er").chmod(0o555)
    age(old)
    stream, packed = run("save", old)
    _, unpacked = run("restore", new, stdin=stream)
    assert content(new) == content(old)
    assert packed == unpacked == {"files": 4, "bytes": 300_014, "skipped": 0, "missing": 0}
    (old / "deep" / "er").chmod(0o755)
    (new / "deep" / "er").chmod(0o755)


def test_a_file_of_holes_takes_no_more_than_before(tmp_path):
    """Red when zeros are written: a workspace that fitted would not fit again."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    with (old / "holes").open("wb") as file:
        file.truncate(2**20)
        file.seek(100_000)
        file.write(b"inside")
        file.truncate(3 * 2**20 + 5)
    run("restore", new, stdin=run("save", old)[0])
    assert (new / "holes").read_bytes() == (old / "holes").read_bytes()
    assert (new / "holes").stat().st_blocks <= (old / "holes").stat().st_blocks


def test_a_link_to_what_could_not_be_packed_costs_nothing_else(tmp_path):
    """Red when the program looks for the link's target in the rest of the stream, which it reads away."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (old / "kept").write_bytes(b"1")
    with (tmp_path / "tar").open("w+b") as stream:
        with tarfile.open(fileobj=stream, mode="w|") as tar:
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.LNKTYPE, "gone"
            tar.addfile(link)
            tar.add(old / "kept", "kept")
        stream.seek(0)
        unpacked = archive.restore(str(new), stream)
    assert vars(unpacked) == {"files": 1, "bytes": 1, "skipped": 1, "missing": 0}
    assert os.listdir(new) == ["kept"]


def test_what_cannot_be_made_is_told_apart_from_a_damaged_stream(tmp_path, monkeypatch):
    """Red when a folder without room for a file looks as if the file were not in the archive."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    for name in ("one", "two"):
        (old / name).write_bytes(b"1234")
    opened = open

    def full(path, mode):
        if path.endswith("two"):
            raise OSError(errno.ENOSPC, "full")
        return opened(path, mode)

    stream, _ = run("save", old)
    monkeypatch.setattr(archive, "open", full, raising=False)
    assert vars(archive.restore(str(new), io.BytesIO(stream))) == {
        "files": 2,
        "bytes": 8,
        "skipped": 1,
        "missing": 1,
    }


@pytest.mark.parametrize("direction", ["save", "restore"])
def test_many_files_take_no_memory(tmp_path, direction):
    """Red when the headers of all files are kept to the end: a sandbox near its memory limit could not be saved."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    for number in range(3000):
        (old / str(number)).touch()
    stream = io.BytesIO()
    archive.save(str(old), stream)
    stream.seek(0)
    tracemalloc.start()
    try:
        if direction == "save":
            archive.save(str(old), _Nowhere())
        else:
            archive.restore(str(new), stream)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "3,000 headers take more than 2 MB"
    finally:
        tracemalloc.stop()


class _Nowhere(io.RawIOBase):
    def write(self, data):
        return len(data)


def test_hard_links_stay_one_file(tmp_path):
    """Red when each name is packed as a file of its own: the workspace might no longer fit."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (old / "one").write_bytes(b"x")
    os.link(old / "one", old / "two")
    run("restore", new, stdin=run("save", old)[0])
    assert (new / "one").samefile(new / "two")


def test_what_was_there_before_is_replaced(tmp_path):
    """Red when restoring adds to what it finds."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (new / "left" / "over").mkdir(parents=True)
    (new / "stale").write_bytes(b"")
    (old / "kept").write_bytes(b"1")
    run("restore", new, stdin=run("save", old)[0])
    assert sorted(os.listdir(new)) == ["kept"]


def test_what_cannot_be_packed_is_counted(tmp_path, monkeypatch):
    """Red without looking at the volume's size: a file of holes would fill the snapshot with zeros for hours."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=256, f_frsize=4096))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with (tmp_path / "holes").open("wb") as file:
            file.truncate(2 * 1024 * 1024)
        (tmp_path / "fine").write_bytes(b"1")
        packed = archive.save(str(tmp_path), io.BytesIO())
    assert vars(packed) == {"files": 1, "bytes": 1, "skipped": 2, "missing": 0}


def test_a_file_that_changes_while_it_is_packed_keeps_the_stream_whole(tmp_path, monkeypatch):
    """Red without padding to the size that the header gave: all that follows would be lost."""
    (tmp_path / "shrinks").write_bytes(b"x" * 1000)
    opened = open

    def shrink(path, mode):
        os.truncate(path, 10)
        return opened(path, mode)

    monkeypatch.setattr(archive, "open", shrink, raising=False)
    with (tmp_path.parent / f"{tmp_path.name}.tar").open("w+b") as stream:
        archive.save(str(tmp_path), stream)
        stream.seek(0)
        with tarfile.open(fileobj=stream) as tar:
            assert tar.extractfile("shrinks").read() == b"x" * 10 + bytes(990)


names = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))
trees = st.recursive(
    st.binary(max_size=2000), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=10
)


def plant(folder, tree):
    for name, what in tree.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            (folder / name).mkdir()
            plant(folder / name, what)


@settings(max_examples=50, deadline=None)
@given(tree=st.dictionaries(names, trees, max_size=5))
def test_any_tree_comes_back(tree, tmp_path_factory):
    """Red when a name, an empty file or an empty folder gets lost on the way."""
    old, new, packed = (tmp_path_factory.mktemp(name) for name in ("old", "new", "packed"))
    plant(old, tree)
    age(old)
    with (packed / "tar").open("w+b") as stream:
        archive.save(str(old), stream)
        stream.seek(0)
        archive.restore(str(new), stream)
    assert content(new) == content(old)


def test_a_stream_that_is_cut_off_is_damaged(tmp_path):
    """Red when half a workspace passes for all of it, or cannot be told from a program that was killed."""
    (tmp_path / "file").write_bytes(b"x" * 50_000)
    stream, _ = run("save", tmp_path)
    _, said = run("restore", tmp_path, stdin=stream[:30_000])
    assert said == {"damaged": "unexpected end of data"}
