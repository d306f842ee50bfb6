"""What a Lambda is packaged with: `requirements/lambda.txt` is enough for each handler, and none of it is there for nothing."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HANDLERS = ("api.lambda_handler", "sweeper.handler", "dead_letters.handler", "scaler.handler")

# As a cold start does, and then what is only imported at the first permit or sandbox; no server has to answer for that.
COLD_START = """
import asyncio, json, sys
__import__(sys.argv[1])
if ".api." in sys.argv[1]:
    import sandfleet.functions.api.host_client
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings

async def first_permit():
    permits = Permits(Settings(aws_endpoint_url="http://127.0.0.1:9"))
    await permits.client()
    await permits.aclose()

asyncio.run(first_permit())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def pinned() -> Iterator[Requirement]:
    """The Lambda's requirements, as far as this Python has them."""
    for line in (ROOT / "requirements" / "lambda.txt").read_text().splitlines():
        if not line.startswith((" ", "#")):
            requirement = Requirement(line.removesuffix("\\"))
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a Lambda gets: the pinned packages of this environment, the domain and the functions."""
    folder = tmp_path_factory.mktemp("lambda")
    for requirement in pinned():
        distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version), requirement
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file.locate())
    (folder / "sandfleet").mkdir()
    for part in ("__init__.py", "shared", "functions"):
        (folder / "sandfleet" / part).symlink_to((ROOT / "src" / "sandfleet" / part).resolve())
    return folder


def cold_start(package: Path, handler: str) -> set[str]:
    """Import a handler in a process that has nothing else; the modules it loads."""
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-P", "-c", COLD_START, f"sandfleet.functions.{handler}"],
        env={"PYTHONPATH": str(package), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_each_handler_is_content_with_its_requirements(package: Path) -> None:
    """And uses all of them. Red when a handler imports what `lambda.txt` does not have, or when a package is asked for that
    no handler imports."""
    loaded = set().union(*(cold_start(package, handler) for handler in HANDLERS))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    modules_of = importlib.metadata.packages_distributions()
    for requirement in asked:
        name = canonicalize_name(Requirement(requirement).name)
        modules = {module for module, names in modules_of.items() if name in map(canonicalize_name, names)}
        assert modules & loaded, f"{name} is never imported"
