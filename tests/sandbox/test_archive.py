"""The program that packs and unpacks a workspace, run as the sandbox runs it: with an interpreter of its own."""

import io
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
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
    assert packed == unpacked == {"files": 4, "bytes": 300_014, "skipped": 0}
    (old / "deep" / "er").chmod(0o755)
    (new / "deep" / "er").chmod(0o755)


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
    assert vars(packed) == {"files": 1, "bytes": 1, "skipped": 2}


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


def test_a_stream_that_is_cut_off_fails(tmp_path):
    """Red when half a workspace passes for all of it."""
    (tmp_path / "file").write_bytes(b"x" * 50_000)
    stream, _ = run("save", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        run("restore", tmp_path, stdin=stream[:30_000])
