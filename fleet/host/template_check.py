"""Whether sandboxes can be made of the templates on an engine: is the runtime there, has the image a Python."""

import ast
import asyncio
import logging
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sandfleet.fleet import sandbox_agent
from sandfleet.fleet.host.backend import AGENT_FOLDER
from sandfleet.fleet.host.base_image import VERSION_LABEL, pull
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.shared.errors import SandfleetError
from sandfleet.shared.templates import Template

logger = logging.getLogger(__name__)

OLDEST_PYTHON = (3, 9)
_TRIAL_TIMEOUT_S = 120.0
_SOCKET = "trial.sock"
_NO_DIAL = 90  # the exit status of an interpreter that runs, but reaches no socket
_TOO_OLD = 100  # plus the minor version: the exit status of an interpreter before OLDEST_PYTHON


async def refusals(engine: Engine, templates: list[Template], labels: dict[str, str]) -> dict[str, str]:
    """What stands against each template by its name, in words; templates that will do are left out.

    An image that the engine does not have is pulled. Each image is tried once, in a container with ``labels``.
    """
    runtimes: dict[str, Any] = (await engine.call("GET", "/info")).get("Runtimes") or {}
    found: dict[tuple[str, str], str | None] = {}
    for template in templates:
        key = template.image, template.runtime
        if key not in found:
            found[key] = await _refusal(engine, template, runtimes, labels)
    reasons = ((template.name, found[template.image, template.runtime]) for template in templates)
    return {name: f"Template {name!r}: {reason}" for name, reason in reasons if reason is not None}


async def _refusal(
    engine: Engine, template: Template, runtimes: dict[str, Any], labels: dict[str, str]
) -> str | None:
    if template.runtime and template.runtime not in runtimes:
        return (
            f"the engine has no runtime {template.runtime!r}, only {', '.join(sorted(runtimes))}. Install it, name it in "
            "the engine's daemon.json, and restart the engine."
        )
    try:
        image = await engine.image(template.image)
        if image is None:
            await pull(engine, template.image)
            image = await engine.image(template.image)
    except EngineError as error:
        return f"the engine has no image {template.image} and cannot pull it ({error.message})."
    ours = image is not None and (image["Config"].get("Labels") or {}).get(VERSION_LABEL)
    if ours and template.runtime in ("", "runc"):
        return None
    return await _try(engine, template, labels)


async def _try(engine: Engine, template: Template, labels: dict[str, str]) -> str | None:
    """Let the image's interpreter import what the agent needs, and dial this machine as the agent does."""
    with _socket_folder() as folder:
        return await _try_with(engine, template, labels, folder)


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """A folder with a socket that anybody may dial."""
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(name)
        folder.chmod(0o755)
        listener.bind(f"{name}/{_SOCKET}")
        (folder / _SOCKET).chmod(0o666)
        listener.listen(1)
        yield folder


async def _try_with(engine: Engine, template: Template, labels: dict[str, str], folder: Path) -> str | None:
    host: dict[str, Any] = {"NetworkMode": "none", "ReadonlyRootfs": True, "LogConfig": {"Type": "none"}}
    host |= {
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "Memory": template.memory,
        "PidsLimit": 64,
    }
    host["Binds"] = [f"{folder}:{AGENT_FOLDER}:ro"]
    if template.runtime:
        host["Runtime"] = template.runtime
    body = {
        "Image": template.image,
        "Entrypoint": ["python3", "-I", "-S", "-c", _program()],
        "Cmd": [],
        "User": "65532:65532",
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": labels,
        "HostConfig": host,
    }
    try:
        container = (await engine.call("POST", "/containers/create", body=body))["Id"]
    except EngineError as error:
        return f"no container can be made of {template.image}: {error.message}"
    try:
        await engine.call("POST", f"/containers/{container}/start")
        ended = await engine.call("POST", f"/containers/{container}/wait", timeout_s=_TRIAL_TIMEOUT_S)
    except EngineError as error:
        missing = "python3" in error.message and (
            "not found" in error.message or "no such file" in error.message
        )
        if missing:
            return f"the image {template.image} has no python3 on its PATH. Sandboxes need Python 3.9 or newer in it."
        return f"a container of {template.image} does not start: {error.message}"
    finally:
        with suppress(SandfleetError, asyncio.CancelledError):
            await asyncio.shield(engine.remove_container(container))
    return _meaning(template.image, ended["StatusCode"])


def _meaning(image: str, status: int) -> str | None:
    if status == 0:
        return None
    if _TOO_OLD <= status < _TOO_OLD + OLDEST_PYTHON[1]:
        return (
            f"the image {image} has Python 3.{status - _TOO_OLD}. Sandboxes need Python 3.9 or newer in it."
        )
    if status == _NO_DIAL:
        return (
            f"a container of {image} cannot dial a socket of the machine, as sandboxes must. The runtime runsc needs the "
            'argument "--host-uds=open" in the engine\'s daemon.json.'
        )
    return (
        f"the Python of the image {image} cannot import the modules of its standard library that sandboxes need (status "
        f"{status}): {', '.join(_modules())}."
    )


def _program() -> str:
    version = f"sys.version_info >= {OLDEST_PYTHON} or sys.exit({_TOO_OLD} + sys.version_info[1])"
    dial = f"socket.socket(socket.AF_UNIX).connect({f'{AGENT_FOLDER}/{_SOCKET}'!r})"
    return (
        f"import sys; {version}\nimport {', '.join(_modules())}\n"
        f"try: {dial}\nexcept OSError: sys.exit({_NO_DIAL})"
    )


def _modules() -> list[str]:
    """Modules of the standard library that the agent imports."""
    names = set()
    for path in Path(sandbox_agent.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module)
    return sorted(name for name in names - {"__future__"} if name.split(".")[0] in sys.stdlib_module_names)
