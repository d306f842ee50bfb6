"""Sandboxes as hardened containers of a Docker Engine."""

import asyncio
import json
import logging
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sandfleet.fleet.host import crashes, disk, labels
from sandfleet.fleet.host.backend import (
    AGENT_ARGUMENTS,
    AGENT_FOLDER,
    SHM,
    TMP,
    WORKSPACE,
    Abandonable,
    Launch,
    environment,
    kernel_files,
)
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.host.freezer import Freezer
from sandfleet.fleet.host.labels import Labels, Owner
from sandfleet.fleet.host.networks import NetworkRefused, Networks
from sandfleet.fleet.host.template_check import refusals
from sandfleet.fleet.sandbox_agent import wire
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.ids import RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import DEFAULT, Template, Templates

logger = logging.getLogger(__name__)

_NO_IPV6 = ("net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.default.disable_ipv6")
_RESTART_S = 20.0  # that the engine may be away: its restart takes less
_FULL = 0.95  # of the memory limit: beside it the kernel takes and gives back a few MiB all the time
_TRIAL_DISK_BYTES = 16 * 1024 * 1024
_SHM_BYTES = 64 * 1024 * 1024
# Kernel limits such as inotify instances or pending signals count per user id on the whole machine, so each sandbox
# gets one of its own, from a range that systemd's list of ids leaves unused (1879048192 to 2147483647).
_UID_FIRST, _UID_COUNT = 1_900_000_000, 200_000_000
# An engine with a user namespace maps 65,536 ids, and maps them away from the machine's own users.
_MAPPED_UID_FIRST, _MAPPED_UID_COUNT = 10_000, 50_000


class DockerBackend:
    """Containers without network, capabilities, writable root or log, one per sandbox."""

    name = "docker"
    patience_s = wire.RESUME_S

    def __init__(self, settings: Settings, templates: Templates, instance: str) -> None:
        self.refused: dict[str, str] = {}
        self._engine = Engine(settings.docker_host, _RESTART_S)
        self._whose = Labels(instance, Owner.of_host(settings, instance))
        self._instance = {labels.OURS: "1", labels.INSTANCE: instance}
        self._networks = Networks(self._engine, settings.network_pool, self._instance)
        self._resolvers = [str(address) for address in settings.sandbox_dns]
        self._templates = templates.templates
        self._folder = settings.host_dir.absolute()
        self._made: dict[str, Template] = {}  # of the sandboxes that there are, by handle
        self._network_of: dict[str, str] = {}  # of those that have one
        self._uids = (_UID_FIRST, _UID_COUNT)
        self._live_restore = False
        self._bounds_writes = False  # the bytes a second of them, of a workspace on disk
        self._freezers: dict[str, Freezer] = {}  # of containers that are frozen, by their ids

    async def open(self) -> None:
        await self._engine.__aenter__()
        info = await self._engine.call("GET", "/info")
        if any(option in ("name=userns", "name=rootless") for option in info.get("SecurityOptions") or ()):
            self._uids = (_MAPPED_UID_FIRST, _MAPPED_UID_COUNT)
        self._live_restore = bool(info.get("LiveRestoreEnabled"))
        self._bounds_writes = str(info.get("CgroupVersion")) == "2"
        if crashes.leave_the_sandbox():
            logger.warning(
                "A crash in a sandbox hands its memory to what this machine's kernel.core_pattern names, outside of the sandbox's "
                "limits: set it to a file name (sysctl -w kernel.core_pattern=core), of which sandboxes write none."
            )
        if not self._live_restore:
            logger.info(
                "the engine ends all sandboxes when it restarts: set live-restore in its daemon.json to keep them"
            )
        image = self._templates[DEFAULT].image
        if await self._engine.image(image) is None:
            raise SandfleetError(
                f"The engine has no image {image}. Build it: "
                f"python -m sandfleet.fleet.host.base_image --tag {image}"
            )
        trials = self._whose.of_all()
        self.refused.update(await refusals(self._engine, list(self._templates.values()), trials))
        for reason in self.refused.values():
            logger.error(reason)
        if DEFAULT in self.refused:
            raise SandfleetError(self.refused[DEFAULT])
        await self._try_disk()
        await self._open_networks()

    async def _try_disk(self) -> None:
        """Refuse the templates with a workspace on disk if none can be made here, or the engine cannot mount it."""
        on_disk = [
            t for t in self._templates.values() if t.workspace_on == "disk" and t.name not in self.refused
        ]
        if on_disk and not self._bounds_writes:
            logger.warning(
                "The bytes a second that sandboxes write to workspaces on disk are not limited here: the kernel's control "
                "groups are of version 1. Their reads and the requests that they sync are."
            )
        for template in on_disk[:1]:
            small = template.model_copy(update={"workspace": _TRIAL_DISK_BYTES})
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                trial = Launch(f"trial-{secrets.token_hex(4)}", None, Path(folder), small)
                uid = self._uids[0]
                body = self._container(trial, uid, {})
                body["HostConfig"] |= {"Binds": [], "NetworkMode": "none"}
                body["Entrypoint"] = ["python3", "-c", "open('/workspace/trial', 'w')"]
                reason = None
                try:
                    async with self._on_disk(trial, uid, body):
                        made = await self._engine.call("POST", "/containers/create", body=body)
                        try:
                            await self._engine.call("POST", f"/containers/{made['Id']}/start")
                        finally:
                            await self._engine.remove_container(made["Id"])
                except SandfleetError as error:
                    reason = error.message
            if reason is not None:
                for refused in on_disk:
                    self.refused[refused.name] = (
                        f'Template {refused.name!r} has workspace_on = "disk", but {reason}. The sandbox host must be root, '
                        "on Linux 5.8 or newer with loop devices and e2fsprogs, and on the engine's own machine."
                    )
                    logger.error(self.refused[refused.name])

    async def _open_networks(self) -> None:
        names = [name for name, template in self._templates.items() if template.network == "egress"]
        if not names:
            return
        try:
            await self._networks.open(_name(f"trial-{secrets.token_hex(4)}", None), self._whose.of_all())
        except NetworkRefused as error:
            for name in names:
                self.refused[name] = f'Template {name!r} has network = "egress", but {error.message}.'
                logger.error(self.refused[name])

    async def sweep(self, alive: Callable[[], set[str]]) -> None:
        found = await self._engine.containers(*(f"{name}={value}" for name, value in self._instance.items()))
        known = alive()
        left = [
            c["Id"]
            for c in found
            if self._whose.may_sweep(c["Labels"]) and c["Labels"].get(labels.SANDBOX) not in known
        ]
        if left:
            await asyncio.gather(*(self._engine.remove_container(container) for container in left))
            logger.info("removed containers that no sandbox owns", extra={"count": len(left)})
        await self._networks.sweep(
            alive=lambda: {_name(sandbox_id, None) for sandbox_id in alive()}, ours=self._whose.may_sweep
        )

    def belong_to(self, deployment: str) -> None:
        self._whose = self._whose._replace(deployment=deployment)

    async def others(self) -> list[Abandonable]:
        filters = [f"{labels.OURS}=1", f"{labels.DEPLOYMENT}={self._whose.deployment}"]
        found = [(c["Id"], False, c["Labels"]) for c in await self._engine.containers(*filters)]
        params = {"filters": json.dumps({"label": filters})}
        networks = await self._engine.call("GET", "/networks", params=params)
        found += [(network["Name"], True, network["Labels"]) for network in networks]
        things = []
        for name, is_network, its in found:
            owner = Owner.read(its)
            if owner is not None and owner != self._whose.owner:
                things.append(Abandonable(owner, name, is_network, its.get(labels.SANDBOX)))
        return things

    async def remove(self, thing: Abandonable) -> None:
        if thing.is_network:
            await self._networks.remove(thing.name)
        else:
            await self._engine.remove_container(thing.name)

    async def create(self, launch: Launch) -> str:
        name, network = _name(launch.sandbox_id, launch.key), _name(launch.sandbox_id, None)
        uid = self._uids[0] + secrets.randbelow(self._uids[1])
        for file, kind in (("passwd", f"x:{uid}:{uid}:sandbox:/workspace:/bin/sh"), ("group", f"x:{uid}:")):
            root = "root:x:0:0:root:/root:/bin/sh" if file == "passwd" else "root:x:0:"
            (launch.folder / file).write_text(f"{root}\nsandbox:{kind}\n")
        template = launch.template
        # Another runtime than runc has a kernel of its own, which knows the limits.
        shown = kernel_files(template) if template.runtime in ("", "runc") else {}
        for path, content in shown.items():
            (launch.folder / Path(path).name).write_text(content)
        if template.network == "egress":
            servers = "".join(f"nameserver {address}\n" for address in self._resolvers)
            (launch.folder / "resolv.conf").write_text(servers)
        body = self._container(launch, uid, shown)
        try:
            if template.network == "egress":
                await self._networks.create(network, self._labels(launch))
            async with self._on_disk(launch, uid, body):
                made = await self._engine.call("POST", "/containers/create", params={"name": name}, body=body)
                await self._engine.call("POST", f"/containers/{name}/start")
        except BaseException:
            with suppress(SandfleetError):
                await self._engine.remove_container(name)
                if template.network == "egress":
                    await self._networks.remove(network)
            raise
        handle = str(made["Id"])
        self._know(launch, handle)
        return handle

    @asynccontextmanager
    async def _on_disk(self, launch: Launch, uid: int, body: dict[str, Any]) -> AsyncIterator[None]:
        """Add a workspace on disk to a container that is to be created and started meanwhile, if its template says so."""
        template = launch.template
        if template.workspace_on == "memory":
            yield
            return
        async with disk.workspace(launch.folder, template.workspace, template.inodes, uid) as device:
            options = {"type": "ext4", "device": device, "o": disk.MOUNT_OPTIONS}
            # The engine mounts it with the container, and forgets it with the container.
            volume = {"DriverConfig": {"Name": "local", "Options": options}, "NoCopy": True}
            del body["HostConfig"]["Tmpfs"][WORKSPACE]
            rates = {
                "ReadBps": template.disk_rate,
                "ReadIOps": template.disk_iops,
                "WriteIOps": template.disk_iops,
            }
            if self._bounds_writes:
                rates["WriteBps"] = template.disk_rate
            for what, rate in rates.items():
                body["HostConfig"][f"BlkioDevice{what}"] = [{"Path": device, "Rate": int(rate)}]
            body["HostConfig"]["Mounts"] = [{"Type": "volume", "Target": WORKSPACE, "VolumeOptions": volume}]
            yield

    def _know(self, launch: Launch, handle: str) -> None:
        self._made[handle] = launch.template
        if launch.template.network == "egress":
            self._network_of[handle] = _name(launch.sandbox_id, None)

    async def adopt(self, launch: Launch, handle: str) -> bool:
        try:
            found = await self._engine.call("GET", f"/containers/{handle}/json")
        except EngineError:
            return False
        if (
            not found["State"]["Running"]
            or found["Config"]["Labels"].get(labels.SANDBOX) != launch.sandbox_id
        ):
            return False
        self._know(launch, handle)
        return True

    def _container(self, launch: Launch, uid: int, shown: dict[str, str]) -> dict[str, Any]:
        limits = launch.template
        mount = f"rw,nosuid,nodev,uid={uid},gid={uid},mode=0700"
        host: dict[str, Any] = {
            # The agent ends when its host stays away, and then nothing is left. Engines up to 20.10 at least remove these
            # at their own restart although they run; there the reaper comes later.
            "AutoRemove": not self._live_restore,
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
        if limits.network == "egress":
            host |= {
                "NetworkMode": _name(launch.sandbox_id, None),
                "Dns": self._resolvers,  # of the engine's own resolver, which asks from within the sandbox's network
                "Sysctls": dict.fromkeys(_NO_IPV6, "1"),
            }
            host["Binds"].append(f"{launch.folder}/resolv.conf:/etc/resolv.conf:ro")
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
            "Labels": self._labels(launch),
            "HostConfig": host,
        }

    def _labels(self, launch: Launch) -> dict[str, str]:
        return {
            **self._whose.of_all(),
            labels.TEMPLATE: launch.template.name,
            labels.SANDBOX: launch.sandbox_id,
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

    async def lend_cpu(self, handle: str, *, lend: bool) -> bool:
        limits = self._made.get(handle)
        if limits is not None and limits.cpus < 1:
            cpus = 1.0 if lend else limits.cpus
            try:
                await self._engine.call(
                    "POST", f"/containers/{handle}/update", body={"NanoCpus": int(cpus * 1e9)}
                )
            except SandfleetError:
                return False
        return True

    async def exhausted(self, handle: str) -> str | None:
        once = {"stream": "false", "one-shot": "true"}
        limits = self._made.get(handle)
        if limits is None:
            return None
        with suppress(SandfleetError):
            stats = await self._engine.call("GET", f"/containers/{handle}/stats", params=once)
            memory = stats["memory_stats"]
            # Of files on a disk the kernel keeps as much as there is room for, and gives it back.
            cached = memory.get("stats", {}).get("inactive_file", 0) + memory.get("stats", {}).get(
                "active_file", 0
            )
            if memory.get("usage", 0) - cached >= _FULL * limits.memory:
                return f"memory ({limits.memory // 2**20} MiB)"
        return None

    async def destroy(self, handle: str) -> None:
        self._freezers.pop(handle, None)  # the engine thaws what it kills
        await self._engine.remove_container(handle)
        if network := self._network_of.get(handle):
            await self._networks.remove(network)
            self._network_of.pop(handle, None)  # it may be destroyed twice at once
        self._made.pop(handle, None)

    async def why(self, handle: str) -> str:
        limits = self._made.get(handle)
        memory = "its memory limit" if limits is None else f"its memory limit of {limits.memory // 2**20} MiB"
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
        self._networks.close()
        await self._engine.__aexit__()


def _name(sandbox_id: str, key: RunKey | None) -> str:
    return f"sandfleet-{sandbox_id}" + ("" if key is None else f"-run-{key.run_id}")
