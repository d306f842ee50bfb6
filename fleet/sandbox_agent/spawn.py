"""Starting a process: its environment, its pipes or its terminal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import struct
import subprocess
import termios

from .operation import BAD_REQUEST, Refused
from .wire import ROOTS, STDERR, STDOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .operation import Json

MARK = "SANDFLEET_COMMAND"  # environment variable by which a command's daemons are found
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)  # by Python
_NICENESS = 19  # however many processes of commands want the CPU, the agent gets its turn and can kill them

# The image's and the host's variables hold for all commands, but for who and where they are.
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    **os.environ,
    "HOME": ROOTS[0],
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "TMPDIR": ROOTS[1],
}


class Spawned:
    """A started process: its pid, the agent's ends of its streams, and how /proc names the other ends."""

    def __init__(self, pid: int, stdin: int | None, outputs: list[tuple[int, int]], ends: set[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.outputs = outputs  # (descriptor, STDOUT or STDERR)
        self.ends = ends


def spawn(spec: Json, mark: str, merged: bool) -> Spawned:
    """Start ``argv`` or ``shell`` in a session of its own; Refused if that cannot be.

    With ``pty`` (rows, columns) it gets a terminal; else pipes, one for stdout and stderr if ``merged``.
    """
    argv = list(spec["argv"]) if "argv" in spec else [shell(), "-c", spec["shell"]]
    terminal = spec.get("pty")
    term = "dumb" if terminal is None else "xterm-256color"
    environment = {**_ENVIRONMENT, "TERM": term, **(spec.get("env") or {}), MARK: mark}
    streams = _Streams()
    try:
        if terminal is not None:
            streams.open_terminal(int(terminal["rows"]), int(terminal["columns"]))
        else:
            streams.open_pipes(bool(spec.get("stdin")), merged)
        cwd = spec.get("cwd") or ROOTS[0]
        start = _start if terminal is None else _start_in_terminal
        pid = start([os.fsencode(part) for part in argv], environment, cwd, streams.theirs)
    except (OSError, IndexError, struct.error, subprocess.SubprocessError, *BAD_REQUEST) as error:
        streams.close_ours()
        raise Refused("cannot_start", f"the command cannot be started: {error}") from None
    finally:
        streams.close_theirs()
    with contextlib.suppress(OSError):  # by group, for what it has forked by now
        os.setpriority(os.PRIO_PGRP, pid, _NICENESS)
    with contextlib.suppress(OSError):
        _first_for_memory(pid)
    return Spawned(pid, streams.stdin, streams.outputs, streams.ends)


def _first_for_memory(pid: int) -> None:
    """When memory runs out the kernel takes a command first, and the agent last."""
    file = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, b"1000")
    finally:
        os.close(file)


def _start(argv: list[bytes], environment: dict[str, str], cwd: str, streams: list[int]) -> int:
    """Start a process in a session of its own with these three descriptors. OSError if that cannot be.

    By posix_spawn, which takes a third of the agent's time that subprocess does. The agent, which has one thread, goes to
    ``cwd`` for it.
    """
    back = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(cwd)
        try:
            return os.posix_spawn(
                _found(argv[0], environment),
                argv,
                {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)],
                setsid=True,
                setsigdef=_IGNORED,
            )
        except NotImplementedError:  # a C library without sessions for it
            return _by_subprocess(argv, environment, ".", streams)
    finally:
        os.fchdir(back)
        os.close(back)


def _found(name: bytes, environment: dict[str, str]) -> bytes:
    """The file of a command, as the shell finds it."""
    if b"/" in name:
        return name
    for folder in os.get_exec_path(environment):
        path = os.path.join(os.fsencode(folder), name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(name))


def _start_in_terminal(argv: list[bytes], environment: dict[str, str], cwd: str, streams: list[int]) -> int:
    return _by_subprocess(argv, environment, cwd, streams, _take_terminal)


def _by_subprocess(
    argv: list[bytes],
    environment: dict[str, str],
    cwd: str,
    streams: list[int],
    first: Callable[[], None] | None = None,
) -> int:
    process = subprocess.Popen(
        argv,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        cwd=cwd,
        env={os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        start_new_session=True,
        preexec_fn=first,  # noqa: PLW1509 - the agent has one thread
    )
    process.returncode = 0  # reaped by the agent by pid, never through this object
    return process.pid


class _Streams:
    """Descriptors of both sides, closed whatever happens in between."""

    def __init__(self) -> None:
        self.theirs: list[int] = []  # stdin, stdout, stderr
        self.stdin: int | None = None
        self.outputs: list[tuple[int, int]] = []
        self.ends: set[str] = set()

    def open_pipes(self, with_stdin: bool, merged: bool) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self.theirs.append(reader)
        if with_stdin:
            self.stdin = writer
            os.set_blocking(writer, False)
        else:
            os.close(writer)  # a reader sees the end at once
        for kind in (STDOUT,) if merged else (STDOUT, STDERR):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            self.outputs.append((reader, kind))
            self.theirs.append(writer)
            self.ends.add(f"pipe:[{os.fstat(reader).st_ino}]")
            os.set_blocking(reader, False)
        if merged:
            self.theirs.append(self.theirs[1])

    def open_terminal(self, rows: int, columns: int) -> None:
        ours, theirs = os.openpty()
        self.theirs += [theirs] * 3
        self.outputs.append((ours, STDOUT))
        self.stdin = os.dup(ours)
        self.ends.add(os.ttyname(theirs))
        os.set_blocking(ours, False)
        set_size(ours, rows, columns)

    def close_theirs(self) -> None:
        for fd in set(self.theirs):
            os.close(fd)

    def close_ours(self) -> None:
        for fd in [fd for fd, _ in self.outputs] + ([] if self.stdin is None else [self.stdin]):
            os.close(fd)


def set_size(terminal: int, rows: int, columns: int) -> None:
    """Give a terminal its size, which its foreground processes learn by SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _take_terminal() -> None:
    """In the new process: make its stdin the controlling terminal of its new session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def shell() -> str:
    """The best shell of the image."""
    return next((path for path in ("/bin/bash", "/usr/bin/bash") if os.path.exists(path)), "/bin/sh")
