"""Starts, watches, restarts and stops the processes of one local stack, and owns its folder while it lives."""

import asyncio
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from sandfleet.localstack.leftovers import INSTANCE_VARIABLE, Record, clear
from sandfleet.localstack.process import LocalStackError, PortTaken, Process, free_port, is_free

_LOCK_WAIT_S = 20.0
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 5.0
_STABLE_S = 10.0
_PORTS_TRIED = 10


class AlreadyRunning(LocalStackError):
    """Another stack holds the folder."""

    code = "already_running"
    status = 409


class Supervisor:
    """The processes of one instance, whose files are below ``root``.

    ``instance`` is a short name that stays the same for the same folder. One supervisor holds a folder at a time
    (a file lock); it begins by removing what a killed predecessor left, and a watchdog process cleans up after
    itself being killed. With ``restart`` a process that dies comes back, with growing pauses (0.1 to 5 s).
    """

    def __init__(
        self, root: Path, *, restart: bool = False, on_event: Callable[[str], None] | None = None
    ) -> None:
        self.root = root.resolve()
        self.instance = hashlib.sha256(str(self.root).encode()).hexdigest()[:12]
        self.logs = self.root / "logs"
        self.run_dir = _run_dir(self.root, self.instance)
        self.processes: dict[str, Process] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._restart = restart
        self._say = on_event or (lambda _: None)
        self._record = Record(self.instance)
        self._record_path = self.root / "processes.json"
        self._lock: IO[str] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._backoff: dict[str, float] = {}
        self._restarting: dict[str, asyncio.Task[None]] = {}

    @property
    def watchdog_pid(self) -> int | None:
        """Process id of the watchdog while this holds its folder."""
        return self._watchdog.pid if self._watchdog is not None else None

    def base_env(self) -> dict[str, str]:
        """Environment that every child gets: no variable of the user's but those that programs need to run."""
        keep = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV")
        env = {name: os.environ[name] for name in keep if name in os.environ}
        return {**env, INSTANCE_VARIABLE: self.instance}

    async def open(self, docker_host: str | None = None) -> list[str]:
        """Take the folder, remove what a killed predecessor left, and return what that was.

        Raises `LocalStackError` if another stack runs here.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        (self.root / ".gitignore").write_text("*\n")  # a project's repository is to hold no keys of ours
        lock_path = self.root / "lock"
        self._lock = await self._take(lock_path)
        removed = await asyncio.to_thread(clear, self._record_path, self.instance, docker_host)
        _private_folder(self.run_dir)
        argv = [sys.executable, "-m", "sandfleet.localstack.watchdog"]
        self._watchdog = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            [
                *argv,
                str(os.getpid()),
                str(lock_path),
                str(self._record_path),
                self.instance,
                str(self.run_dir),
            ],
            env=self.base_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._watching = asyncio.create_task(self._watch(), name="localstack-supervisor")
        return removed

    def use_engine(self, docker_host: str) -> None:
        """Record the engine that containers of this instance are on."""
        self._record.docker_host = docker_host
        self._save()

    async def start(self, process: Process) -> None:
        """Start a process and wait until it is ready."""
        self.processes[process.name] = process
        process.spawn()
        self._save()
        await process.wait_ready()

    async def start_on_port(self, make: Callable[[int], Process], wish: int | None = None) -> int:
        """Start the process that ``make`` makes for a free TCP port, and return the port: ``wish`` if that is free.

        Somebody else may take a port before the process does: then it is made anew for another one.
        """
        port = wish if wish is not None and is_free(wish) else free_port()
        for _ in range(_PORTS_TRIED):
            process = make(port)
            process.port = port
            try:
                await self.start(process)
            except PortTaken:
                self._say(f"Port {port} was taken before {process.name} had it; trying another")
                port = free_port()
            else:
                return port
        raise LocalStackError(f"{process.name} found {_PORTS_TRIED} ports taken, one after the other.")

    async def restart(self, name: str) -> None:
        """Stop a process if it runs, start it anew with the same arguments and wait until it is ready."""
        await self.processes[name].stop()
        await self.start(self.processes[name])

    async def stop(self, *names: str) -> None:
        """Stop processes side by side."""
        await asyncio.gather(*(self.processes[name].stop() for name in names if name in self.processes))
        self._save()

    async def close(self) -> list[str]:
        """Stop everything that still runs, side by side, and give the folder back.

        Returns what had to be removed by force; empty is the normal case.
        """
        tasks = list(self._restarting.values())
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stop(*self.processes)
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.kill()
            watchdog.wait()
            assert watchdog.stdin is not None
            watchdog.stdin.close()
        removed: list[str] = []
        if self._lock is not None:
            removed = await asyncio.to_thread(clear, self._record_path, self.instance)
            shutil.rmtree(self.run_dir, ignore_errors=True)
            self._lock.close()
            self._lock = None
        return removed

    async def _take(self, path: Path) -> IO[str]:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            lock, holder = _try_lock(path)
            if lock is not None:
                return lock
            # A dead supervisor's watchdog holds the lock for moments only, a live stack for as long as it runs.
            if psutil.pid_exists(holder) or time.monotonic() > deadline:
                raise AlreadyRunning(
                    f"A stack already runs in {self.root} (process {holder}). "
                    "Stop it first, or use another folder with --root."
                )
            await asyncio.sleep(0.1)

    @property
    def holds_folder(self) -> bool:
        """Whether `open` took the folder and `close` has not given it back."""
        return self._lock is not None

    def _save(self) -> None:
        if not self.holds_folder:
            return
        self._record.processes = [
            (name, process.pid, created)
            for name, process in self.processes.items()
            if process.pid is not None and (created := process.create_time()) is not None
        ]
        self._record.save(self._record_path)
        self.on_change()

    async def _watch(self) -> None:
        """Look every 50 ms for processes that should run and do not."""
        due: dict[str, float] = {}
        while True:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            for name, process in list(self.processes.items()):
                if not process.wanted or process.pid is not None or name in self._restarting:
                    continue
                if not self._restart:
                    process.wanted = False
                    self._say(f"{name} ended with exit code {process.exit_code}; see {process.log}")
                    continue
                if name not in due:
                    if now - process.started_at > _STABLE_S:
                        self._backoff.pop(name, None)
                    pause = self._backoff.get(name, _FIRST_BACKOFF_S)
                    self._backoff[name] = min(pause * 2, _LAST_BACKOFF_S)
                    due[name] = now + pause
                    self._say(f"{name} ended with exit code {process.exit_code}; restarting in {pause:.1f} s")
                elif now >= due[name]:
                    del due[name]
                    process.kill_group()
                    process.spawn()
                    self._save()
                    self._restarting[name] = asyncio.create_task(self._await_restart(process))

    async def _await_restart(self, process: Process) -> None:
        """A process that does not become ready counts as dead: killed if it still runs, and started once more."""
        try:
            await process.wait_ready()
        except LocalStackError as error:
            self._say(error.message.splitlines()[0])
            process.kill_group()
            await process.wait(5.0)
        else:
            self._say(f"{process.name} is back")
        finally:
            del self._restarting[process.name]


def _try_lock(path: Path) -> tuple[IO[str] | None, int]:
    """Lock the file and write this process's id into it; or None and the id that stands there."""
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        return None, int(holder) if holder.isdigit() else 0
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock, os.getpid()


def _private_folder(path: Path) -> None:
    """Make a folder that only this user can enter; raise if somebody else made it first."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.geteuid():
        raise LocalStackError(f"{path} belongs to another user; remove it.")


def _run_dir(root: Path, instance: str) -> Path:
    """Folder for unix sockets, whose paths may have 107 bytes: below ``root`` if that is short enough."""
    if len(str(root)) <= 48:
        return root / "run"
    if os.geteuid() == 0:
        return Path("/run") / f"sandfleet-{instance}"
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / f"sandfleet-{instance}"
    return Path(tempfile.gettempdir()) / f"sandfleet-{os.getuid()}-{instance}"
