"""What Lambdas and images are made of, gathered below ``build/`` by uv: no Docker, no compiler, no network but PyPI.

A folder's name is a digest of what goes into it, so a second synthesis finds it there.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sandfleet.infra_cdk.deployment import ROOT, TEMPLATES, Deployment, WrongContext

BUILD = ROOT / "build" / "deploy"

_SERVICES = frozenset({"autoscaling", "cloudwatch", "ecs", "s3", "sqs", "sts"})
"""What Lambdas call through botocore's clients."""
_PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "arm64": "aarch64-manylinux_2_28"}
_PARTS = {
    "lambda": (("shared", "functions"), "lambda.txt"),
    "gateway": (("shared", "functions"), "gateway.txt"),
    "executor": (("shared", "fleet"), "fleet.txt"),
    "host": (("shared", "fleet"), "fleet.txt"),
}
"""Our folders and the pinned packages of each part."""
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "node_modules", "*.egg-info")
_NOT_OF_A_PROJECT = shutil.ignore_patterns(
    "__pycache__",
    "*.pyc",
    ".git",
    ".venv",
    "venv",
    ".env",
    ".env.*",
    "node_modules",
    ".sandfleet",
    ".langgraph_api",
    "cdk.out",
)
# Lambda's own runtime has these, and nothing of ours imports them.
_USELESS_IN_A_LAMBDA = ("bin", "boto3", "s3transfer", "**/tests", "**/*.pyi", "**/*.dist-info/RECORD")


def lambda_code(deployment: Deployment) -> Path:
    """The folder that is the code of all Lambdas."""
    return _built("lambda", deployment.architecture, deployment.python)


def image_context(part: str, deployment: Deployment) -> Path:
    """The build context of an image: ``Dockerfile``, ``site`` (packages and ours), and the executor's ``project``."""
    return _built(part, deployment.architecture, deployment.python, deployment.project)


def _built(part: str, architecture: str, python: str, project: Path | None = None) -> Path:
    with_project = project if part in ("executor", "host") else None
    digest = hashlib.sha256(f"{part} {architecture} {python}".encode())
    for path in _inputs(part, with_project):
        digest.update(f"{path} {path.stat().st_mode & 0o111}\n".encode())
        digest.update(path.read_bytes())
    target = BUILD / f"{part}-{architecture}-{digest.hexdigest()[:16]}"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD, prefix=f".{part}-") as folder:
            new = Path(folder) / "new"
            _build(part, new, architecture, python, with_project)
            try:
                new.rename(target)
            except OSError:  # another synthesis was quicker: it made the same
                if not target.exists():
                    raise
    return target


def _build(part: str, target: Path, architecture: str, python: str, project: Path | None) -> None:
    folders, requirements = _PARTS[part]
    site = target if part == "lambda" else target / "site"
    site.mkdir(parents=True)
    _install(site, architecture, python, "--require-hashes", "-r", str(ROOT / "requirements" / requirements))
    if part == "host" and project is not None:
        (target / "project").mkdir()
        for file in _templates(project):
            shutil.copy(file, target / "project")
    elif project is not None:
        wanted = list(project_requirements(project))
        if wanted:
            constraints = ("-c", str(_without_hashes(ROOT / "requirements" / requirements, target.parent)))
            _install(site, architecture, python, *wanted, *constraints)
        shutil.copytree(project.parent, target / "project", ignore=_NOT_OF_A_PROJECT)
    package = site / "sandfleet"
    package.mkdir()
    shutil.copy(ROOT / "src" / "sandfleet" / "__init__.py", package)
    for folder in folders:
        shutil.copytree(ROOT / folder, package / folder, ignore=_LEFT_OUT)
    if part == "lambda":
        _keep_services(site / "botocore" / "data")
        for pattern in _USELESS_IN_A_LAMBDA:
            for path in site.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        shutil.copy(_dockerfile(part), target / "Dockerfile")


def _keep_services(data: Path) -> None:
    """Descriptions of AWS' 400 services are a third of a package that calls six of them."""
    for service in data.iterdir():
        if service.is_dir() and service.name not in _SERVICES:
            shutil.rmtree(service)


def _install(site: Path, architecture: str, python: str, *what: str) -> None:
    command = [
        *(uv(), "pip", "install", "--quiet", "--target", str(site), "--only-binary", ":all:"),
        *("--python-platform", _PLATFORMS[architecture], "--python-version", python, *what),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise WrongContext(
            f"Packages for {architecture} and Python {python} could not be gathered:\n{error.stderr.strip()}"
        ) from None


def project_requirements(project: Path) -> Iterator[str]:
    """What uv is to install for a project, as its arguments: packages that ``langgraph.json`` names, and those that its
    local folders ask for in ``requirements.txt`` or ``pyproject.toml``. The folders themselves are copied, not installed."""
    for dependency in json.loads(project.read_bytes()).get("dependencies", []):
        if not dependency.startswith("."):
            yield dependency
            continue
        folder = project.parent / dependency
        if not folder.resolve().is_relative_to(project.parent):
            raise WrongContext(
                f"{project}: the dependency {dependency!r} is outside of the project's folder, which is what the image "
                "gets. Move langgraph.json up, or publish that package."
            )
        for name in ("requirements.txt", "pyproject.toml"):
            if (folder / name).is_file():
                yield from ("-r", str(folder / name))
                break


def _without_hashes(requirements: Path, folder: Path) -> Path:
    """The pinned versions as constraints: a project may add packages and not change ours."""
    lines = [line.partition(" \\")[0] for line in requirements.read_text().splitlines()]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if "==" in line))
    return constraints


def _templates(project: Path) -> list[Path]:
    """The file with the sandbox templates: all that a host needs of a project."""
    file = project.parent / TEMPLATES
    return [file] if file.is_file() else []


def _dockerfile(part: str) -> Path:
    return ROOT / "infra_cdk" / "images" / f"{part}.Dockerfile"


def _inputs(part: str, project: Path | None) -> list[Path]:
    folders, requirements = _PARTS[part]
    roots: Iterable[Path] = [ROOT / folder for folder in folders]
    files = [ROOT / "requirements" / requirements, ROOT / "src" / "sandfleet" / "__init__.py", Path(__file__)]
    if part != "lambda":
        files.append(_dockerfile(part))
    for root in roots:
        files += _files(root, _LEFT_OUT)
    if part == "host" and project is not None:
        files += _templates(project)
    elif project is not None:
        files += _files(project.parent, _NOT_OF_A_PROJECT)
    return sorted(files)


def _files(root: Path, ignored: object) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        left_out = ignored(folder, [*folders, *names])  # type: ignore[operator]
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder) / name for name in names if name not in left_out)


def uv() -> str:
    """The program. Raises WrongContext when there is none."""
    found = shutil.which("uv") or next(
        (
            str(path)
            for path in (Path(sys.prefix) / "bin" / "uv", ROOT / ".tools" / "bin" / "uv")
            if path.exists()
        ),
        None,
    )
    if found is None:
        raise WrongContext("uv is needed to gather packages: `make install-cdk` brings it.")
    return found
