"""One supervised child process: started in a session of its own, its output in a log file."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sandfleet.shared.errors import SandfleetError

_LOG_BYTES = 10 * 1024 * 1024
_POLL_S = 0.02
# Below those that Linux gives to outgoing connections (from 32768): one of these could take a port before its server does.
_PORTS = range(20_000, 32_000)


class LocalStackError(SandfleetError):
    """A part of the local stack cannot be used; the message says what to do."""

    code = "local_stack"
    status = 503


class PortTaken(LocalStackError):
    """A server found its port taken by somebody else."""

    code = "port_taken"


def is_free(port: int) -> bool:
    """Whether a server could listen on this TCP port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do, after one that has just ended
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now; nobody keeps it so. Raises `LocalStackError` if there is none."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if is_free(port):
            return port
    raise LocalStackError(f"All TCP ports of 127.0.0.1 from {_PORTS.start} to {_PORTS.stop - 1} are taken.")


async def tcp_answers(port: int, address: str = "127.0.0.1") -> bool:
    """Whether something accepts connections on this port of an address."""
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True


@dataclass(eq=False)
class Process:
    """A child process and how to start, check and stop it.

    ``ready`` tells whether it serves; ``stop_signal`` asks it to end, and after ``stop_timeout_s`` it is killed.
    ``restore`` is called whenever it has become ready, to put back what it does not keep itself.
    ``wanted`` is true from when it is ready until somebody stops it: a supervisor restarts what is wanted and dead.
    ``one_body``: it works in child processes too, which `send` stops, continues and kills with it.
    ``port`` is the TCP port that it listens on, if any: until then whatever answers there is somebody else.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    ready: Callable[[], Awaitable[bool]]
    restore: Callable[[], Awaitable[None]] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_timeout_s: float = 15.0
    start_timeout_s: float = 60.0
    one_body: bool = False
    port: int | None = None
    wanted: bool = field(default=False, init=False)
    started_at: float = field(default=0.0, init=False)
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _log_from: int = field(default=0, init=False, repr=False)  # where the log of this life begins

    def spawn(self) -> None:
        """Start the process without waiting until it is ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        with self.log.open("ab") as log:
            self._log_from = log.tell()
            self._child = subprocess.Popen(
                list(self.argv),
                env=dict(self.env),
                cwd=self.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last life (negative: the signal), None while it runs or if it never ran."""
        return self._child.poll() if self._child is not None else None

    async def wait_ready(self) -> None:
        """Return when the process serves.

        Raises PortTaken if it ends because somebody else has its port, and `LocalStackError` if it ends for another
        reason or does not answer in time.
        """
        deadline = time.monotonic() + self.start_timeout_s
        while not (self._listens() and await self.ready()):
            if self.pid is None:
                kind = PortTaken if self._found_its_port_taken() else LocalStackError
                raise kind(
                    f"{self.name} ended with exit code {self.exit_code} before it was ready. "
                    f"Its log {self.log} ends with:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise LocalStackError(
                    f"{self.name} was not ready within {self.start_timeout_s:.0f} s. "
                    f"Its log {self.log} ends with:\n{self.log_tail()}"
                )
            await asyncio.sleep(_POLL_S)
        if self.restore is not None:
            await self.restore()
        self.wanted = True

    def _listens(self) -> bool:
        """Whether the process or a child of it has the port, if it is to have one."""
        if self.port is None:
            return True
        with suppress(psutil.Error):
            process = psutil.Process(self.pid) if self.pid is not None else None
            for each in (process, *process.children()) if process is not None else ():
                for connection in each.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port:
                        return True
        return False

    def _found_its_port_taken(self) -> bool:
        """By what it said in this life: servers have no common exit code for it."""
        if self.port is None:
            return False
        with self.log.open("rb") as log:
            log.seek(self._log_from)
            return b"already in use" in log.read()

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log, of this life alone."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - 8192))
                text = log.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    def send(self, sig: int) -> None:
        """Send a signal to the process if it runs."""
        if (pid := self.pid) is None:
            return
        body: list[psutil.Process] = []
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if self.one_body and sig in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
                process.suspend()  # it starts no more children meanwhile
                body = process.children(recursive=True)
            for each in (process, *body):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(sig)

    async def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.pid is not None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def stop(self) -> bool:
        """End the process, by force after its time to stop; returns whether it ended by itself."""
        self.wanted = False
        if self._child is None:
            return True
        self.send(signal.SIGCONT)
        self.send(self.stop_signal)
        clean = await self.wait(self.stop_timeout_s)
        self.kill_group()
        await self.wait(5.0)
        return clean

    def kill_group(self) -> None:
        """Kill with SIGKILL whatever is left of the process and of the children in its session."""
        if self._child is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def create_time(self) -> float | None:
        """Start time as `psutil` gives it, which together with the pid names a process for ever."""
        try:
            return psutil.Process(self.pid).create_time() if self.pid is not None else None
        except psutil.Error:
            return None
