"""``make images``: executor and gateway as images of the local engine, from a base image that it has: no registry is asked.

Their names begin with a registry that cannot exist, so that whoever would rather pull an image than use what is there, as an
emulator does, is told no at once, and nobody can offer another image under such a name. Their tag says what is in them: what
is there already is not built again.

The base needs only a Python of the version of this process; ``sandfleet.fleet.host.base_image`` makes one. The sandbox host
is left out: an emulator has no machines, and its image fetches nft.

Each step is a line of its standard error that begins with `STEP`, since the first build takes a minute and more.
"""

import argparse
import hashlib
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
STEP = "Step: "
NOWHERE = "127.0.0.1:1"
"""A registry that is never there: nothing listens on this port."""
_KEPT = 5

_BASE = """ARG BASE
FROM ${BASE}
COPY libraries /
"""


def build(base: str, project: str, tag: str = "") -> dict[str, str]:
    """Build both; returns the name of each, as the context ``images`` takes them. Raises WrongContext."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    deployment = read_deployment({"python": python, "project": project})
    contexts = {}
    for part in PARTS:
        _step(f"packing what the {part} needs (packages are fetched if they are new)")
        contexts[part] = image_context(part, deployment)
    base_id = _docker("image", "inspect", "--format", "{{.Id}}", base)
    names = {
        part: f"{NOWHERE}/sandfleet-{part}:{tag or _digest(base_id, context.name)}"
        for part, context in contexts.items()
    }
    missing = [part for part in PARTS if tag or not _is_there(names[part])]
    if missing:
        with_libraries = f"{NOWHERE}/sandfleet-base:{_digest(*names.values())}"
        _step(f"building the image that {' and '.join(missing)} begin with")
        with tempfile.TemporaryDirectory() as folder:
            _add_libraries(Path(folder) / "libraries", contexts.values())
            (Path(folder) / "Dockerfile").write_text(_BASE)
            _build(base, with_libraries, Path(folder))
        for part in missing:
            _step(f"building the image of the {part}")
            _build(with_libraries, names[part], contexts[part])
        for part in ("base", *PARTS):
            _forget_old(f"{NOWHERE}/sandfleet-{part}")
    return names


def _step(what: str) -> None:
    sys.stderr.write(f"{STEP}{what}\n")
    sys.stderr.flush()


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


def _is_there(name: str) -> bool:
    return bool(_docker("image", "ls", "--quiet", name))


def _forget_old(repository: str) -> None:
    """Remove all but the newest, and those that containers use."""
    for tag in _docker("image", "ls", "--format", "{{.Tag}}", repository).split()[_KEPT:]:
        name = f"{repository}:{tag}"
        if not _docker("ps", "--all", "--quiet", "--filter", f"ancestor={name}"):
            # The engine refuses what else needs it.
            subprocess.run(["docker", "image", "rm", name], capture_output=True, check=False)


def _docker(*words: str) -> str:
    """What a command prints. Raises WrongContext."""
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise WrongContext("The command docker is missing, which builds images.") from None
    if done.returncode:
        raise WrongContext(f"docker {' '.join(words)} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _build(base: str, name: str, context: Path) -> None:
    _docker(
        *("build", "--quiet", "--network", "none"),
        *("--build-arg", f"BASE={base}", "--tag", name, str(context)),
    )


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
    parser.add_argument("--tag", default="", help="default: a digest of what goes into the image")
    parser.add_argument("--json", action="store_true", help="print their names alone")
    parser.add_argument("--project", default=str(ROOT / "examples" / "langgraph.json"))
    options = parser.parse_args()
    try:
        names = build(options.base, options.project, options.tag)
    except WrongContext as error:
        sys.exit(str(error))
    text = json.dumps(names)
    sys.stdout.write(f"{text}\n" if options.json else f"-c images='{text}'\n")


if __name__ == "__main__":
    main()
