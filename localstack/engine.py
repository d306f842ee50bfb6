"""Finds a Docker Engine for sandboxes, installs and starts one where it may, or says what bwrap means."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandfleet.localstack import docker_api
from sandfleet.localstack.process import LocalStackError, Process
from sandfleet.localstack.supervisor import Supervisor

BWRAP_MEANS = (
    "Sandboxes run under bwrap: for development only. They share this machine's kernel and user and have no disk "
    "or memory limits of an engine's kind; do not run code of strangers in them."
)
_APT_LOCK_WAIT_S = 300
_ADDRESS = "socket"


@dataclass(frozen=True)
class Sandboxing:
    """How sandboxes are run: ``backend`` is ``docker`` (at ``docker_host``) or ``bwrap``."""

    backend: str
    docker_host: str | None
    version: str | None = None


def find_engine(env: Mapping[str, str], engine_dir: Path | None = None) -> tuple[str, str] | None:
    """Address and version of an engine that answers: ``DOCKER_HOST``, the usual sockets, one of ours in ``engine_dir``.

    Raises `LocalStackError` if ``DOCKER_HOST`` is set and nothing answers there.
    """
    if named := env.get("DOCKER_HOST"):
        if version := docker_api.version(named):
            return named, version
        raise LocalStackError(
            f"No Docker Engine answers at DOCKER_HOST={named}. Start it, or unset DOCKER_HOST."
        )
    home = Path(env.get("HOME", "/root"))
    sockets = [
        Path("/var/run/docker.sock"),
        home / ".docker/run/docker.sock",
        home / ".colima/default/docker.sock",
    ]
    if runtime := env.get("XDG_RUNTIME_DIR"):
        sockets.append(Path(runtime) / "docker.sock")
    if engine_dir is not None and (engine_dir / _ADDRESS).exists():
        sockets.append(Path((engine_dir / _ADDRESS).read_text()))
    for path in sockets:
        if path.exists() and (version := docker_api.version(f"unix://{path}")):
            return f"unix://{path}", version
    return None


def may_install() -> bool:
    """Whether packages can be installed: root on Debian or a relative of it."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


async def install(package: str, say: Callable[[str], None]) -> None:
    """Install a Debian package. An interrupt is passed on to apt, which ends at a safe point."""
    say(f"Installing the Debian package {package} (once; this takes a minute)")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = ["-q", "-y", "--no-install-recommends", "-o", f"DPkg::Lock::Timeout={_APT_LOCK_WAIT_S}"]
    for arguments in (["install", *options, package], ["update", "-q"], ["install", *options, package]):
        process = await asyncio.create_subprocess_exec(
            "apt-get",
            *arguments,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            await asyncio.shield(process.communicate())
            raise
        if process.returncode == 0 and arguments[0] == "install":
            return
    raise LocalStackError(
        f"apt-get could not install {package}: {output.decode(errors='replace').strip()[-600:]}\n"
        "Install it yourself, or set SANDFLEET_SANDBOX=bwrap."
    )


async def choose_sandboxing(
    supervisor: Supervisor,
    wish: str,
    engine_dir: Path,
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> Sandboxing:
    """Decide where sandboxes run, and start an engine of our own if that is needed and allowed.

    ``wish`` is ``docker``, ``bwrap`` or ``auto``: an engine if there is one or one can be started, else bwrap.
    """
    if wish != "bwrap":
        found = await asyncio.to_thread(find_engine, env, engine_dir)
        if found is not None:
            return Sandboxing("docker", *found)
        if may_install():
            try:
                return await _own_engine(supervisor, engine_dir, say)
            except LocalStackError as error:
                if wish == "docker":
                    raise
                say(f"No Docker Engine of our own: {error.message.splitlines()[0]}")
        elif wish == "docker":
            raise LocalStackError("No Docker Engine answers. Start one, or set DOCKER_HOST to where it is.")
    await ensure_bwrap(say)
    say(BWRAP_MEANS)
    return Sandboxing("bwrap", None)


async def ensure_bwrap(say: Callable[[str], None]) -> None:
    """Make sure that bwrap is there and works, installing it if that is allowed; `LocalStackError` if not."""
    if shutil.which("bwrap") is None:
        if not may_install():
            raise LocalStackError(
                "Sandboxes need a Docker Engine or bwrap, and neither is here. Start Docker, or install the package "
                "bubblewrap."
            )
        await install("bubblewrap", say)
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = await asyncio.to_thread(subprocess.run, probe, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise LocalStackError(
            f"bwrap does not work here ({done.stderr.strip()}). Allow user namespaces, or start a Docker Engine."
        )


async def ensure_nft(say: Callable[[str], None]) -> None:
    """Install nftables if it is missing and that is allowed; without it the host refuses the policy egress."""
    if shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None and may_install():
        await install("nftables", say)


async def _own_engine(supervisor: Supervisor, folder: Path, say: Callable[[str], None]) -> Sandboxing:
    """Start a daemon whose files, images included, are below ``folder``, so that the next start finds them."""
    if shutil.which("dockerd") is None:
        await install("docker.io", say)
        # Where systemd runs, the package has started the machine's own engine.
        found = await _machine_engine()
        if found is not None:
            return Sandboxing("docker", *found)
    runtime = supervisor.run_dir / "engine"
    docker_host = f"unix://{runtime}/docker.sock"
    _engine_folders(folder, runtime)
    say("Starting a Docker Engine of our own (no engine answers); it stops with the stack")

    async def ready() -> bool:
        return await asyncio.to_thread(docker_api.version, docker_host) is not None

    await supervisor.start(
        Process(
            name="dockerd",
            argv=[
                "dockerd",
                *("--data-root", str(folder / "data"), "--exec-root", str(runtime / "exec")),
                *("--pidfile", str(runtime / "pid"), "--host", docker_host),
                # Sandboxes have no network, or one of their own: the default bridge would stay behind.
                "--bridge=none",
            ],
            env=supervisor.base_env() | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
            cwd=Path("/"),
            log=supervisor.logs / "dockerd.log",
            ready=ready,
            stop_timeout_s=30.0,
        )
    )
    return Sandboxing("docker", docker_host, await asyncio.to_thread(docker_api.version, docker_host))


def _engine_folders(folder: Path, runtime: Path) -> None:
    """Make the folders, and note in the lasting one where the engine listens, for other stacks to find it."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime.mkdir(exist_ok=True)
    (folder / _ADDRESS).write_text(f"{runtime}/docker.sock")


def _systemd_runs() -> bool:
    return Path("/run/systemd/system").exists()


async def _machine_engine() -> tuple[str, str] | None:
    if not _systemd_runs():
        return None
    for _ in range(50):
        found = await asyncio.to_thread(find_engine, {})
        if found is not None:
            return found
        await asyncio.sleep(0.2)
    return None
