"""SWE-ReX (swe-rex on PyPI) in containers of the same image, beside our sandboxes. It needs its server in the image."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from sandfleet.localstack.measure.bed import IMAGE, Bed
from sandfleet.localstack.process import LocalStackError

_PACKAGES, _LIBRARIES = "/usr/local/lib/swe-rex", "/usr/local/lib/swe-rex-libraries"
_SERVER = b"#!/usr/bin/env python3\nimport sys\nfrom swerex.server import main\nsys.exit(main())\n"
_BURST_S = 900.0
_PIECE_BYTES = 2**20
_CLIENT = Path(__file__).with_name("swe_rex_client.py")


def check(environment: Path) -> None:
    """Raise LocalStackError, which says what to do, unless it can be measured with this environment."""
    if not any(environment.glob("lib/python3*/site-packages/swerex")):
        raise LocalStackError(
            f"There is no swe-rex in {environment}: uv venv --python .venv/bin/python {environment} && "
            f"uv pip install --python {environment} swe-rex aiohttp"
        )
    if shutil.which("docker") is None:
        raise LocalStackError("swe-rex starts containers by the docker command, which is not on the PATH.")


@asynccontextmanager
async def image(bed: Bed, environment: Path) -> AsyncIterator[str]:
    """The sandboxes' image with the packages of an environment, and the libraries of this machine that they load; removed at
    the end."""
    name = f"sandfleet-measure-{bed.stack.info.instance}"
    labels = {"sandfleet.instance": bed.stack.info.instance}
    made = await bed.engine.call(
        "POST", "/containers/create", body={"Image": IMAGE, "Cmd": ["true"], "Labels": labels}
    )
    try:
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, environment, archive.fileno())
            archive.seek(0)
            path = f"/containers/{made['Id']}/archive"
            await bed.engine.call("PUT", path, params={"path": "/"}, data=_pieces(archive))
        changes = f"ENV PYTHONPATH={_PACKAGES} LD_LIBRARY_PATH={_LIBRARIES}"
        params = {"container": made["Id"], "repo": name, "changes": changes}
        await bed.engine.call("POST", "/commit", params=params, body={})
    finally:
        await bed.engine.remove_container(made["Id"])
    try:
        yield name
    finally:
        await bed.engine.call("DELETE", f"/images/{name}")


async def burst(bed: Bed, environment: Path, name: str, number: int) -> list[float]:
    """So many at once: seconds until the end of the first command of each. Raises LocalStackError when that fails."""
    label = f"sandfleet.instance={bed.stack.info.instance}"
    running = await asyncio.create_subprocess_exec(
        environment / "bin" / "python",
        _CLIENT,
        *(name, str(number), label),
        env={**os.environ, "DOCKER_HOST": bed.stack.info.docker_host or ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_BURST_S):
            told, wrong = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    if running.returncode:
        raise LocalStackError(f"swe-rex failed: {wrong.decode(errors='replace')[-3000:]}")
    spent: list[float] = json.loads(told.splitlines()[-1])
    return spent


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _pack(environment: Path, target: int) -> None:
    (packages,) = environment.glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(target), "wb") as file:
        server = Path(folder) / "swerex-remote"
        server.write_bytes(_SERVER)
        server.chmod(0o755)
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(packages, _PACKAGES)
            archive.add(server, "/usr/local/bin/swerex-remote")
            for library in _libraries(packages):
                archive.add(library.resolve(), f"{_LIBRARIES}/{library.name}")


def _libraries(packages: Path) -> set[Path]:
    """What the packages' compiled parts load, but for the C library, which the image has."""
    compiled = [str(path) for path in packages.rglob("*.so*")]
    listing = subprocess.run(["ldd", *compiled], capture_output=True, text=True, check=False).stdout
    found = {Path(path) for path in re.findall(r"=> (/\S+) \(0x", listing)}
    return {
        path for path in found if not path.name.startswith(("libc.", "ld-")) and packages not in path.parents
    }
