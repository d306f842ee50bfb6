"""``make images``: executor and gateway as images of the local engine, from a base image that it has: no registry is asked.

The base needs only a Python of the version of this process; ``sandfleet.fleet.host.base_image`` makes one. The sandbox host
is left out: an emulator has no machines, and its image fetches nft.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sandfleet.infra_cdk.deployment import ROOT, WrongContext, read_deployment
from sandfleet.infra_cdk.packaging import image_context

PARTS = ("executor", "gateway")

_BASE = """ARG BASE
FROM ${BASE}
COPY libraries /
"""


def build(base: str, tag: str, project: str) -> dict[str, str]:
    """Build both; returns the name of each, as the context ``images`` takes them. Raises WrongContext."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    deployment = read_deployment({"python": python, "project": project})
    contexts = {part: image_context(part, deployment) for part in PARTS}
    with_libraries = f"sandfleet-base-with-libraries:{tag}"
    with tempfile.TemporaryDirectory() as folder:
        _add_libraries(Path(folder) / "libraries", contexts.values())
        (Path(folder) / "Dockerfile").write_text(_BASE)
        _build(base, with_libraries, Path(folder))
    for part, context in contexts.items():
        _build(with_libraries, f"sandfleet-{part}:{tag}", context)
    return {part: f"sandfleet-{part}:{tag}" for part in PARTS}


def _build(base: str, name: str, context: Path) -> None:
    command = [
        "docker",
        "build",
        "--quiet",
        "--network",
        "none",
        "--build-arg",
        f"BASE={base}",
        "--tag",
        name,
    ]
    done = subprocess.run([*command, str(context)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongContext(f"{name} could not be built:\n{done.stderr.strip() or done.stdout.strip()}")


def _add_libraries(target: Path, contexts: Iterable[Path]) -> None:
    """This machine's libraries that compiled packages load and that a slim base may lack, at the same paths."""
    compiled = [str(path) for context in contexts for path in context.rglob("*.so*")]
    # ldd answers a non-zero status when one of many files is static.
    listing = subprocess.run(["ldd", *compiled], capture_output=True, text=True, check=False).stdout
    for found in sorted(set(re.findall(r"=> (/(?:usr/)?lib\S*) \(0x", listing))):
        place = target / "usr" / found.removeprefix("/usr").lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, place)


def main() -> None:
    """Print the context that names the images."""
    parser = argparse.ArgumentParser(prog="python -m sandfleet.infra_cdk.local_images", description=__doc__)
    parser.add_argument("--base", required=True, help="image with Python")
    parser.add_argument("--tag", default="local")
    parser.add_argument("--project", default=str(ROOT / "examples" / "langgraph.json"))
    options = parser.parse_args()
    try:
        names = build(options.base, options.tag, options.project)
    except WrongContext as error:
        sys.exit(str(error))
    sys.stdout.write(f"-c images='{json.dumps(names)}'\n")


if __name__ == "__main__":
    main()
