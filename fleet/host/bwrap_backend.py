"""Sandboxes made with bubblewrap, for development on a machine without a Docker Engine."""

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from sandfleet.fleet.host.backend import (
    AGENT_ARGUMENTS,
    AGENT_FOLDER,
    SHM,
    TMP,
    WORKSPACE,
    Abandonable,
    Launch,
    environment,
)
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey
from sandfleet.shared.templates import DEFAULT, Template, Templates

logger = logging.getLogger(__name__)

_UID_FIRST, _UID_COUNT = 1_900_000_000, 200_000_000  # as for containers: kernel limits count per user id
_INSIDE_UID = 65532
_START_TIMEOUT_S = 10.0


@dataclass
class _Process:
    bwrap: asyncio.subprocess.Process
    pid1: int | None  # a pidfd of the sandbox's PID 1


class BwrapBackend:
    """Processes with own pid, network, ipc and mount namespaces. Memory is limited per process, not per sandbox."""

    name = "bwrap"
    patience_s = 0.0

    def __init__(self, templates: Templates) -> None:
        self.refused: dict[str, str] = {}
        self._templates = templates.templates
        self._processes: dict[str, _Process] = {}

    async def open(self) -> None:
        if shutil.which("bwrap") is None:
            raise SandfleetError(
                "bwrap is not installed: install bubblewrap, or use SANDFLEET_SANDBOX=docker."
            )
        trial = await asyncio.create_subprocess_exec(
            "bwrap", *_isolation(self._templates[DEFAULT]), "true",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, complaint = await trial.communicate()
        if trial.returncode != 0:
            raise SandfleetError(
                f"bwrap cannot make a sandbox here: {complaint.decode(errors='replace').strip()[:300]}. "
                "Allow unprivileged user namespaces, or use SANDFLEET_SANDBOX=docker."
            )
        for name, template in self._templates.items():
            if template.network == "egress":
                self.refused[name] = (
                    f'Template {name!r} has network = "egress", which needs a Docker Engine: bwrap makes no networks.'
                )
                logger.error(self.refused[name])
            elif template.workspace_on == "disk":
                self.refused[name] = (
                    f'Template {name!r} has workspace_on = "disk", which needs a Docker Engine: bwrap mounts no file systems.'
                )
                logger.error(self.refused[name])
        logger.warning(
            "sandboxes are made with bwrap: for development only. They share this machine's kernel and programs, "
            "their memory is limited per process, and their CPU is not limited"
        )

    def belong_to(self, deployment: str) -> None:
        """Nothing outlives this process that could be told by it."""

    async def others(self) -> list[Abandonable]:
        return []

    async def remove(self, thing: Abandonable) -> None:
        raise AssertionError("there are none")

    async def sweep(self, alive: Callable[[], set[str]]) -> None:
        return  # sandboxes die with the process that started them

    async def create(self, launch: Launch) -> str:
        template = launch.template
        uid = _UID_FIRST + secrets.randbelow(_UID_COUNT) if os.getuid() == 0 else _INSIDE_UID
        (launch.folder / "passwd").write_text(f"sandbox:x:{uid}:{uid}:sandbox:/workspace:/bin/sh\n")
        reader, writer = os.pipe()
        try:
            bwrap = await asyncio.create_subprocess_exec(
                "bwrap", *_isolation(template),
                "--perms", "0755", "--dir", os.path.dirname(AGENT_FOLDER),  # the relay passes through, as another user
                "--ro-bind", str(launch.folder), AGENT_FOLDER,
                "--ro-bind", str(launch.folder / "passwd"), "/etc/passwd",
                "--remount-ro", "/", "--info-fd", str(writer), "--",
                "prlimit", f"--nproc={template.pids}", f"--data={template.memory}", "--core=0",
                f"--nofile={template.open_files}", "--", _python(), *AGENT_ARGUMENTS,
                *([str(uid), str(uid)] if os.getuid() == 0 else []),
                pass_fds=(writer,), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        process = _Process(bwrap, None)
        self._processes[launch.sandbox_id] = process
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                process.pid1 = os.pidfd_open(await _child_pid(reader))
        except (TimeoutError, ValueError, KeyError, OSError) as error:
            await self.destroy(launch.sandbox_id)
            raise SandfleetError("bwrap could not start a sandbox.") from error
        except BaseException:
            await self.destroy(launch.sandbox_id)
            raise
        return launch.sandbox_id

    async def adopt(self, launch: Launch, handle: str) -> bool:
        return False

    async def freeze(self, handle: str) -> bool:
        return self._signal_agent(handle, signal.SIGSTOP)

    async def thaw(self, handle: str) -> bool:
        return self._signal_agent(handle, signal.SIGCONT)

    def _signal_agent(self, handle: str, number: int) -> bool:
        """What has run no command yet is one process: the agent."""
        process = self._processes.get(handle)
        if process is None or process.pid1 is None:
            return False
        try:
            signal.pidfd_send_signal(process.pid1, number)
        except ProcessLookupError:
            return False
        return True

    async def name_run(self, handle: str, sandbox_id: str, key: RunKey) -> None:
        """Processes have no names to change."""

    async def kill(self, handle: str) -> None:
        # The end of PID 1 ends its namespace: the kernel kills all that is in it.
        process = self._processes.get(handle)
        if process is not None:
            if process.pid1 is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(process.pid1, signal.SIGKILL)
            with suppress(ProcessLookupError):
                process.bwrap.kill()

    async def lend_cpu(self, handle: str, *, lend: bool) -> bool:
        return True  # it has no limit of CPU time to lift

    async def exhausted(self, handle: str) -> str | None:
        return None

    async def destroy(self, handle: str) -> None:
        process = self._processes.get(handle)
        if process is None:
            return
        await self.kill(handle)
        await process.bwrap.wait()
        if self._processes.pop(handle, None) is not None and process.pid1 is not None:
            os.close(process.pid1)

    async def why(self, handle: str) -> str:
        return "its first process ended"

    async def close(self) -> None:
        return


def _isolation(template: Template) -> list[str]:
    arguments = [
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if os.getuid() != 0:
        arguments += ["--unshare-user", "--uid", str(_INSIDE_UID), "--gid", str(_INSIDE_UID)]
    arguments += ["--die-with-parent", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    arguments += ["--setenv", "PATH", f"{os.path.dirname(_python())}:/usr/local/bin:/usr/bin:/bin"]
    for name, value in environment(template).items():
        arguments += ["--setenv", name, value]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        else:
            arguments += ["--ro-bind-try", name, name]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):
        arguments += ["--ro-bind-try", name, name]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr"):
        arguments += ["--ro-bind", prefix, prefix]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for path, size in (
        (SHM, template.tmp),
        (TMP, template.tmp),
        (WORKSPACE, template.workspace),
    ):
        arguments += ["--perms", "1777", "--size", str(size), "--tmpfs", path]
    return [*arguments, "--chdir", WORKSPACE]


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


async def _child_pid(reader: int) -> int:
    """The pid that bwrap writes to its --info-fd; closes the descriptor."""
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
    )
    try:
        return int(json.loads(await stream.readuntil(b"}"))["child-pid"])
    except asyncio.IncompleteReadError as error:
        raise ValueError("bwrap ended before it started anything") from error
    finally:
        transport.close()
