"""What Lambdas and images are made of: gathered by uv alone, small, and importable with nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandfleet.infra_cdk import packaging
from sandfleet.infra_cdk.deployment import WrongContext, read_deployment

LARGEST_LAMBDA_MIB = 80
"""Unpacked. Lambda's own limit is 250; the time of a cold start grows with it."""
MOST_MODULES = 1_500
"""Loaded by the API's cold start: FastAPI, pydantic, psycopg, Redis and powertools are some 1,200."""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A build folder of this module's own."""
    folder = tmp_path_factory.mktemp("build")
    before, packaging.BUILD = packaging.BUILD, folder
    yield folder
    packaging.BUILD = before


@pytest.fixture(scope="module")
def code(build):
    return packaging.lambda_code(read_deployment({}))


def size_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def test_the_package_of_the_lambdas_is_small(code):
    """Red when a package comes in that no function needs, or descriptions of AWS' services that nobody calls."""
    assert size_mib(code) < LARGEST_LAMBDA_MIB
    assert not [
        name for name in ("langgraph", "langchain_core", "boto3", "uvicorn") if (code / name).exists()
    ]
    assert {path.name for path in (code / "sandfleet").iterdir()} == {"__init__.py", "shared", "functions"}


def test_a_second_synthesis_finds_what_the_first_one_gathered(code, monkeypatch):
    """Red when each `cdk deploy` installs all packages anew."""
    monkeypatch.setattr(packaging, "_install", lambda *_: pytest.fail("installed again"))
    assert packaging.lambda_code(read_deployment({})) == code


def test_the_api_loads_few_modules_in_a_cold_start(code):
    """A count, since a time says more about the machine. Red when a large package is imported at the start."""
    program = (
        "import json, sys, sandfleet.functions.api.lambda_handler; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        # Compiled parts are for the runtime's Python, so this one's packages stand in for them: the names are the same.
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("SANDFLEET_", "AWS_"))},
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    assert len(modules) < MOST_MODULES, len(modules)
    heavy = {"aiobotocore", "alembic", "sqlalchemy", "langgraph", "aiohttp", "boto3"}
    assert heavy & {name.partition(".")[0] for name in modules} == set()


def a_project(folder: Path, **more) -> Path:
    folder.mkdir()
    (folder / "graph.py").write_text("graph = None\n")
    (folder / ".env").write_text("SECRET=1\n")
    (folder / "langgraph.json").write_text(
        json.dumps({"graphs": {"g": "./graph.py:graph"}, "dependencies": ["."], **more})
    )
    return folder / "langgraph.json"


@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml"])
def test_the_image_has_the_project_and_what_it_asks_for(build, tmp_path, monkeypatch, name):
    """Red when a dependency is not installed, a secret file gets in, or the project is not there."""
    project = a_project(tmp_path / "project", dependencies=[".", "rich"])
    content = (
        "tabulate\n"
        if name == "requirements.txt"
        else '[project]\nname="p"\nversion="1"\ndependencies=["tabulate"]\n'
    )
    (project.parent / name).write_text(content)
    monkeypatch.setitem(packaging._PARTS, "executor", (("shared", "fleet"), "gateway.txt"))  # few packages
    context = packaging.image_context("executor", read_deployment({"project": str(project)}))
    assert {path.name for path in context.iterdir()} == {"Dockerfile", "site", "project"}
    assert (context / "site" / "rich").is_dir()
    assert (context / "site" / "tabulate").exists() or list((context / "site").glob("tabulate*"))
    assert {path.name for path in (context / "project").iterdir()} == {"graph.py", "langgraph.json", name}


def test_a_dependency_outside_of_the_project_is_refused(tmp_path):
    """The image would not have it. Red when it is passed over in silence."""
    project = a_project(tmp_path / "project", dependencies=["../lib"])
    with pytest.raises(WrongContext, match="outside of the project's folder"):
        list(packaging.project_requirements(project))


def test_without_uv_it_says_what_brings_it(monkeypatch):
    """Red when the error is Python's own."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(packaging, "ROOT", Path("/nowhere"))
    with pytest.raises(WrongContext, match="make install-cdk"):
        packaging.uv()
