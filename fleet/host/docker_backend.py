"""Sandboxes as hardened containers of a Docker Engine."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandfleet.fleet.host.backend import (
    AGENT_ARGUMENTS,
    AGENT_FOLDER,
    SHM,
    TMP,
    WORKSPACE,
    Launch,
    environment,
    kernel_files,
)
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.host.freezer import Freezer
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey
from sandfleet.shared.templates import DEFAULT, Template, Templates

logger = logging.getLogger(__name__)

LABEL = "sandfleet"
INSTANCE_LABEL = "sandfleet.instance"
TEMPLATE_LABEL = "sandfleet.template"
SANDBOX_LABEL = (
    "sandfleet.sandbox"  # its id; the run is in the container's name, since labels cannot be changed
)
_FULL = 0.95  # of the memory limit: beside it the kernel takes and gives back a few MiB all the time
_SHM_BYTES = 64 * 1024 * 1024
# Kernel limits such as inotify instances or pending signals count per user id on the whole machine, so each sandbox
# gets one of its own, from a range that systemd's list of ids leaves unused (1879048192 to 2147483647).
_UID_FIRST, _UID_COUNT = 1_900_000_000, 200_000_000
# An engine with a user namespace maps 65,536 ids, and maps them away from the machine's own users.
_MAPPED_UID_FIRST, _MAPPED_UID_COUNT = 10_000, 50_000


class DockerBackend:
    """Containers without network, capabilities, writable root or log, one per sandbox."""

    name = "docker"

    def __init__(self, docker_host: str, templates: Templates, instance: str) -> None:
        self.refused: dict[str, str] = {}
        self._engine = Engine(docker_host)
        self._templates = templates.templates
        self._instance = instance
        self._made: dict[str, Template] = {}  # of the sandboxes that there are, by handle
        self._uids = (_UID_FIRST, _UID_COUNT)
        self._freezers: dict[str, Freezer] = {}  # of containers that are frozen, by their ids

    async def open(self) -> None:
        await self._engine.__aenter__()
        info = await self._engine.call("GET", "/info")
        if any(option in ("name=userns", "name=rootless") for option in info.get("SecurityOptions") or ()):
            self._uids = (_MAPPED_UID_FIRST, _MAPPED_UID_COUNT)
        image = self._templates[DEFAULT].image
        if await self._engine.image(image) is None:
            raise SandfleetError(
                f"The engine has no image {image}. Build it: "
                f"python -m sandfleet.fleet.host.base_image --tag {image}"
            )

    async def sweep(self, alive: Callable[[], set[str]]) -> None:
        found = await self._engine.containers(f"{LABEL}=1", f"{INSTANCE_LABEL}={self._instance}")
        known = alive()
        left = [c["Id"] for c in found if c["Labels"].get(SANDBOX_LABEL) not in known]
        if left:
            await asyncio.gather(*(self._engine.remove_container(container) for container in left))
            logger.info("removed containers that no sandbox owns", extra={"count": len(left)})

    async def create(self, launch: Launch) -> str:
        name = _name(launch.sandbox_id, launch.key)
        uid = self._uids[0] + secrets.randbelow(self._uids[1])
        for file, kind in (("passwd", f"x:{uid}:{uid}:sandbox:/workspace:/bin/sh"), ("group", f"x:{uid}:")):
            root = "root:x:0:0:root:/root:/bin/sh" if file == "passwd" else "root:x:0:"
            (launch.folder / file).write_text(f"{root}\nsandbox:{kind}\n")
        template = launch.template
        # Another runtime than runc has a kernel of its own, which knows the limits.
        shown = kernel_files(template) if template.runtime in ("", "runc") else {}
        for path, content in shown.items():
            (launch.folder / Path(path).name).write_text(content)
        try:
            made = await self._engine.call(
                "POST", "/containers/create", params={"name": name}, body=self._container(launch, uid, shown)
            )
            await self._engine.call("POST", f"/containers/{name}/start")
        except BaseException:
            with suppress(SandfleetError):
                await self._engine.remove_container(name)
            raise
        handle = str(made["Id"])
        self._made[handle] = template
        return handle

    def _container(self, launch: Launch, uid: int, shown: dict[str, str]) -> dict[str, Any]:
        limits = launch.template
        mount = f"rw,nosuid,nodev,uid={uid},gid={uid},mode=0700"
        host: dict[str, Any] = {
            "AutoRemove": True,  # the agent ends when its host dies, and then nothing is left
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "Binds": [
                f"{launch.folder}:{AGENT_FOLDER}:ro",
                f"{launch.folder}/passwd:/etc/passwd:ro",
                f"{launch.folder}/group:/etc/group:ro",
                *(f"{launch.folder}/{Path(path).name}:{path}:ro" for path in shown),
            ],
            "Tmpfs": {
                WORKSPACE: f"{mount},exec,size={limits.workspace},nr_inodes={limits.inodes}",
                TMP: f"{mount},exec,size={limits.tmp},nr_inodes={limits.inodes}",
                SHM: f"{mount},noexec,size={_SHM_BYTES},nr_inodes={limits.inodes}",
            },
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "PidsLimit": limits.pids,
            "Memory": limits.memory,
            "MemorySwap": limits.memory,
            "NanoCpus": int(limits.cpus * 1e9),
            "OomScoreAdj": 500,  # a sandbox goes before the services of the machine
            "LogConfig": {"Type": "none"},
            "Init": False,
            "IpcMode": "private",
            "RestartPolicy": {"Name": "no"},
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files},
            ],
        }
        if limits.runtime:
            host["Runtime"] = limits.runtime
        return {
            "Image": limits.image,
            "Entrypoint": ["python3", *AGENT_ARGUMENTS],
            "Cmd": [],
            "User": f"{uid}:{uid}",
            "WorkingDir": WORKSPACE,
            "Env": [f"{name}={value}" for name, value in environment(limits).items()],
            "Hostname": "sandbox",
            "StopSignal": "SIGKILL",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {
                LABEL: "1",
                INSTANCE_LABEL: self._instance,
                TEMPLATE_LABEL: limits.name,
                SANDBOX_LABEL: launch.sandbox_id,
            },
            "HostConfig": host,
        }

    async def freeze(self, handle: str) -> bool:
        try:
            state = (await self._engine.call("GET", f"/containers/{handle}/json"))["State"]
            if freezer := Freezer.of(handle, state["Pid"]):
                self._freezers[handle] = freezer
                return freezer.set(frozen=True)
            await self._engine.call("POST", f"/containers/{handle}/pause")
        except SandfleetError:
            return False
        return True

    async def thaw(self, handle: str) -> bool:
        if freezer := self._freezers.pop(handle, None):
            return freezer.set(frozen=False)
        try:
            await self._engine.call("POST", f"/containers/{handle}/unpause")
        except SandfleetError:
            return False
        return True

    async def name_run(self, handle: str, sandbox_id: str, key: RunKey) -> None:
        with suppress(SandfleetError):
            await self._engine.call(
                "POST", f"/containers/{handle}/rename", params={"name": _name(sandbox_id, key)}
            )

    async def kill(self, handle: str) -> None:
        # Frozen, nothing can fork away from the signal; the engine thaws a container that it has killed.
        for call in ("pause", "kill"):
            with suppress(SandfleetError):
                await self._engine.call("POST", f"/containers/{handle}/{call}")

    async def lend_cpu(self, handle: str, *, lend: bool) -> None:
        limits = self._made[handle]
        if limits.cpus < 1:
            cpus = 1.0 if lend else limits.cpus
            with suppress(SandfleetError):
                await self._engine.call(
                    "POST", f"/containers/{handle}/update", body={"NanoCpus": int(cpus * 1e9)}
                )

    async def exhausted(self, handle: str) -> str | None:
        once = {"stream": "false", "one-shot": "true"}
        limit = self._made[handle].memory
        with suppress(SandfleetError):
            stats = await self._engine.call("GET", f"/containers/{handle}/stats", params=once)
            if stats["memory_stats"].get("usage", 0) >= _FULL * limit:
                return f"memory ({limit // 2**20} MiB)"
        return None

    async def destroy(self, handle: str) -> None:
        self._freezers.pop(handle, None)  # the engine thaws what it kills
        await self._engine.remove_container(handle)
        self._made.pop(handle, None)

    async def why(self, handle: str) -> str:
        memory = f"its memory limit of {self._made[handle].memory // 2**20} MiB"
        for _ in range(20):
            try:
                state = (await self._engine.call("GET", f"/containers/{handle}/json"))["State"]
            except EngineError:
                return f"it ended; if it used much memory, {memory} did that"
            except SandfleetError:
                return "the Docker Engine ended it"
            if state["OOMKilled"]:
                return f"it went over {memory}"
            if not state["Running"]:
                return f"it ended with status {state['ExitCode']}"
            await asyncio.sleep(0.05)
        return "its agent ended the connection"

    async def close(self) -> None:
        await self._engine.__aexit__()


def _name(sandbox_id: str, key: RunKey | None) -> str:
    return f"sandfleet-{sandbox_id}" + ("" if key is None else f"-run-{key.run_id}")
