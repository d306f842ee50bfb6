"""The sandbox's base image, built without a registry from programs of this machine, or on a given image.

``python -m sandfleet.fleet.host.base_image --tag NAME`` imports a root file system into the Docker Engine: the
running Python with its standard library, bash, and the usual text and file tools with the libraries they load.
The agent is no part of it: the host binds it into every sandbox, so any image with Python 3.9 or newer will do.
"""

import argparse
import asyncio
import hashlib
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from sandfleet.fleet.host import rootfs
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.shared import logs
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.settings import settings

logger = logging.getLogger(__name__)

VERSION_LABEL = "sandfleet.image-version"
_IMPORT_TIMEOUT_S = 300.0
_PULL_TIMEOUT_S = 1800.0
_CHUNK = 1024 * 1024
_CHANGES = ("ENTRYPOINT []", 'CMD ["bash"]', "WORKDIR /workspace")
_RECIPE = repr(_CHANGES).encode()


def _say_nothing(_: str) -> None: ...


def version(base: str | None = None) -> str:
    """What the image's content depends on, as a short digest: a changed recipe or interpreter gives another one."""
    content = base.encode() if base is not None else rootfs.recipe() + sys.version.encode()
    return hashlib.sha256(_RECIPE + content).hexdigest()[:16]


async def ensure_image(
    docker_host: str, tag: str, base: str | None = None, on_progress: Callable[[str], None] = _say_nothing
) -> bool:
    """Make sure that the engine has a current image ``tag``; True if it was built, False if it was there.

    ``base`` names an image that the engine has or can pull; without one the image is assembled from this machine.
    Raises EngineUnreachable, EngineError, or SandfleetError when a needed program is missing here.
    """
    wanted = version(base)
    async with Engine(docker_host) as engine:
        old = await engine.image(tag)
        if old is not None and (old["Config"].get("Labels") or {}).get(VERSION_LABEL) == wanted:
            return False
        if base is None:
            await _import(engine, tag, wanted, on_progress)
        else:
            await _derive(engine, tag, base, wanted, on_progress)
        if old is not None:
            with suppress(EngineError):  # a container or another tag still uses it
                await engine.call("DELETE", f"/images/{old['Id']}")
    return True


async def _import(engine: Engine, tag: str, wanted: str, on_progress: Callable[[str], None]) -> None:
    on_progress("assembling the sandbox image from this machine's programs")
    with tempfile.TemporaryFile() as archive:
        await asyncio.to_thread(rootfs.write_archive, archive)
        size = archive.tell()
        archive.seek(0)
        on_progress(f"importing the sandbox image ({size // 1_000_000} MB)")

        async def chunks() -> AsyncIterator[bytes]:
            while part := await asyncio.to_thread(archive.read, _CHUNK):
                yield part

        repository, name = _split(tag)
        params = [("fromSrc", "-"), ("repo", repository), ("tag", name)]
        params += [("changes", change) for change in (f"LABEL {VERSION_LABEL}={wanted}", *_CHANGES)]
        await engine.call("POST", "/images/create", params=params, data=chunks(), timeout_s=_IMPORT_TIMEOUT_S)


async def pull(engine: Engine, image: str) -> None:
    """Fetch an image from its registry. Raises EngineError if that cannot be."""
    name, tag = _split(image)
    params = [("fromImage", name), ("tag", tag)]
    await engine.call("POST", "/images/create", params=params, timeout_s=_PULL_TIMEOUT_S)


async def _derive(
    engine: Engine, tag: str, base: str, wanted: str, on_progress: Callable[[str], None]
) -> None:
    """Label ``base`` as ``tag``: pull it if need be, and commit a container of it that never runs."""
    if await engine.image(base) is None:
        on_progress(f"pulling {base}")
        await pull(engine, base)
    on_progress(f"making {tag} from {base}")
    container = await engine.call("POST", "/containers/create", body={"Image": base, "Cmd": ["true"]})
    try:
        repository, name = _split(tag)
        params = [("container", container["Id"]), ("repo", repository), ("tag", name)]
        params += [("changes", change) for change in (f"LABEL {VERSION_LABEL}={wanted}", *_CHANGES)]
        await engine.call("POST", "/commit", params=params, body={})
    finally:
        await engine.remove_container(container["Id"])


def _split(reference: str) -> tuple[str, str]:
    """Repository and tag of an image reference; a registry's port is no tag."""
    repository, colon, tag = reference.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (reference, "latest")


def main() -> None:
    """The command line: build the image if the engine has no current one, and log what was done."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.fleet.host.base_image", description=__doc__)
    parser.add_argument(
        "--tag", default=settings().sandbox_image, help="name of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--from", dest="base", help="image to build on; default: assemble one from this machine"
    )
    parser.add_argument("--docker-host", default=settings().docker_host, help="engine (default: %(default)s)")
    options = parser.parse_args()
    logs.configure("base-image", settings().log_level)
    start = time.monotonic()
    try:
        built = asyncio.run(ensure_image(options.docker_host, options.tag, options.base, logger.info))
    except SandfleetError as error:
        logger.error(error.message)
        sys.exit(1)
    spent = round(time.monotonic() - start, 1)
    logger.info(
        "image built" if built else "image is current", extra={"image": options.tag, "seconds": spent}
    )


if __name__ == "__main__":
    main()
