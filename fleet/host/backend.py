"""What a sandbox host needs from the thing that isolates sandboxes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandfleet.fleet.host.labels import Owner
from sandfleet.fleet.sandbox_agent.relay import PORT
from sandfleet.shared.ids import RunKey
from sandfleet.shared.templates import Template

AGENT_FOLDER = "/run/sandfleet"  # where a sandbox finds its agent and the socket to dial
AGENT_NAME = "agent"  # of the folder in it that is the agent
AGENT_ARGUMENTS = ("-I", "-S", f"{AGENT_FOLDER}/{AGENT_NAME}", f"{AGENT_FOLDER}/agent.sock")
WORKSPACE, TMP, SHM = "/workspace", "/tmp", "/dev/shm"  # noqa: S108 - the writable mounts of a sandbox


def environment(template: Template) -> dict[str, str]:
    """The template's variables, after those that tell programs how many CPUs they have and where a proxy is.

    The kernel shows them those of the machine. ``nproc`` itself and OpenMP read the first, then OpenBLAS, Go, Rust's
    rayon and Python 3.13.
    """
    cpus = str(max(1, math.ceil(template.cpus)))
    names = (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "GOMAXPROCS",
        "RAYON_NUM_THREADS",
        "PYTHON_CPU_COUNT",
    )
    return {**dict.fromkeys(names, cpus), **_proxy(template), **template.env}


def _proxy(template: Template) -> dict[str, str]:
    """Where the host's forward proxy is, in the names by which programs look for it."""
    if template.network != "allowlist":
        return {}
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    local = "localhost,127.0.0.1,::1"
    return {**dict.fromkeys(names, f"http://127.0.0.1:{PORT}"), "no_proxy": local, "NO_PROXY": local}


def kernel_files(template: Template) -> dict[str, str]:
    """What the kernel would say of this much memory and these CPUs, by the path of its file.

    The C library counts CPUs in the second, ``free`` reads the first. All memory is shown as free: the numbers
    stand still, but the machine's own would promise what the limit refuses.
    """
    kib = template.memory // 1024
    values = {"MemTotal": kib, "MemFree": kib, "MemAvailable": kib}
    empty = ("Buffers", "Cached", "SwapCached", "SwapTotal", "SwapFree", "Shmem", "SReclaimable")
    values.update(dict.fromkeys(empty, 0))
    meminfo = "".join(f"{name + ':':<16}{value:>8} kB\n" for name, value in values.items())
    last = max(1, math.ceil(template.cpus)) - 1
    return {
        "/proc/meminfo": meminfo,
        "/sys/devices/system/cpu/online": f"0-{last}\n" if last else "0\n",
    }


@dataclass(frozen=True)
class Launch:
    """What to start: the sandbox's id, its run if it has one yet, the folder here that it sees as AGENT_FOLDER, and its
    template."""

    sandbox_id: str
    key: RunKey | None
    folder: Path
    template: Template


@dataclass(frozen=True)
class Abandonable:
    """A container or network of another host of this deployment; ``sandbox_id`` is None for a trial's."""

    owner: Owner
    name: str
    is_network: bool
    sandbox_id: str | None


class Backend(Protocol):
    """Starts and ends isolated processes whose PID 1 is the agent. Handles are opaque to the caller."""

    name: str
    patience_s: float
    """How long sandboxes outlive this process, waiting for the next one to adopt them; 0: they end with it."""
    refused: dict[str, str]
    """Templates that sandboxes cannot be made of here, and why, in words; known once it is open."""

    async def open(self) -> None:
        """Check that sandboxes can be started here. Raises SandfleetError with what to do about it."""

    def belong_to(self, deployment: str) -> None:
        """What is made from now on belongs to this deployment; before `open` too, which makes things to try them."""

    async def others(self) -> list[Abandonable]:
        """What other hosts of the same deployment have made, and is still there."""

    async def remove(self, thing: Abandonable) -> None:
        """Remove one of these; one that is gone is fine. Raises SandfleetError."""

    async def sweep(self, alive: Callable[[], set[str]]) -> None:
        """Remove what belongs to this instance but to no sandbox of ``alive``: ids, asked for after looking.

        An earlier life of the host may have left it, or a call to the engine whose answer was lost.
        """

    async def create(self, launch: Launch) -> str:
        """Start a sandbox and return its handle; nothing is left when it raises."""

    async def adopt(self, launch: Launch, handle: str) -> bool:
        """Know a sandbox again that an earlier life of this process has started; false if it does not run."""

    async def freeze(self, handle: str) -> bool:
        """Stop everything in the sandbox until ``thaw``; false if that failed."""

    async def thaw(self, handle: str) -> bool:
        """Let a frozen sandbox go on; false if that failed."""

    async def name_run(self, handle: str, sandbox_id: str, key: RunKey) -> None:
        """Show people whose a sandbox is that was started without a run; never raises."""

    async def kill(self, handle: str) -> None:
        """Freeze and kill everything in the sandbox from outside; never raises for one that is gone."""

    async def lend_cpu(self, handle: str, *, lend: bool) -> bool:
        """Let a sandbox use a whole CPU, or again only what its limits say; false if that failed."""

    async def exhausted(self, handle: str) -> str | None:
        """Which limit a running sandbox has reached, in words; None when there is none, or nobody knows."""

    async def destroy(self, handle: str) -> None:
        """End the sandbox and remove all of it; one that is gone is fine. May raise; then call again later."""

    async def why(self, handle: str) -> str:
        """Why a sandbox ended by itself, in words."""

    async def close(self) -> None:
        """Let go of the backend's own resources; sandboxes were destroyed before."""
