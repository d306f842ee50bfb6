"""A LangGraph project: the ``langgraph.json`` that the LangGraph CLI reads, with the keys that matter at run time."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import orjson
from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sandfleet.shared.errors import GraphLoadError


class Project(BaseModel):
    """The parsed file. Keys that only concern image building (``dockerfile_lines``, …) are accepted and unused here."""

    model_config = ConfigDict(extra="ignore")

    root: Path = Path()
    """The folder of the file; all paths in it are relative to this."""
    graphs: dict[str, str] = Field(min_length=1)
    """Graph id → ``./path/file.py:name`` or ``package.module:name``."""
    dependencies: list[str] = Field(default_factory=list)
    """Local folders (``.``, ``./lib``), put on the import path, and names of installed packages."""
    env: str | dict[str, str] = Field(default_factory=dict)
    """A dotenv file's path, or the variables themselves."""

    @field_validator("graphs", mode="before")
    @classmethod
    def _path_of_each(cls, graphs: Any) -> Any:
        if not isinstance(graphs, dict):
            return graphs
        return {k: v["path"] if isinstance(v, dict) and "path" in v else v for k, v in graphs.items()}

    def only(self, graph_ids: Collection[str]) -> Self:
        """The project with these graphs alone; with all of them if none is named. Raises GraphLoadError."""
        if not graph_ids:
            return self
        if unknown := set(graph_ids) - self.graphs.keys():
            raise GraphLoadError(
                f"SANDFLEET_GRAPHS names {min(unknown)!r}, but langgraph.json has {', '.join(self.graphs)}."
            )
        return self.model_copy(update={"graphs": {i: p for i, p in self.graphs.items() if i in graph_ids}})

    def import_roots(self) -> list[Path]:
        """Folders that the graphs import from, the project's own last."""
        local = [(self.root / d).resolve() for d in self.dependencies if d.startswith(".")]
        return [*local, self.root.resolve()]

    def check_paths(self) -> None:
        """Raise GraphLoadError for a file or folder that the file names and that is not there. Imports nothing."""
        self.environment()
        for folder in (self.root / d for d in self.dependencies if d.startswith(".")):
            if not folder.is_dir():
                raise GraphLoadError(
                    f"langgraph.json names the dependency {folder}, but there is no such folder."
                )
        for graph_id, spec in self.graphs.items():
            where, _ = split_spec(graph_id, spec)
            if is_file(where) and not (path := (self.root / where).resolve()).is_file():
                raise GraphLoadError(f"There is no {path}, which langgraph.json names.")

    def environment(self) -> dict[str, str]:
        """Variables that the project asks for. Raises GraphLoadError when its file is missing."""
        if isinstance(self.env, dict):
            return self.env
        path = self.root / self.env
        if not path.is_file():
            raise GraphLoadError(
                f"langgraph.json names env {self.env!r}, but there is no such file. Create {path}."
            )
        return {k: v for k, v in dotenv_values(path).items() if v is not None}


def split_spec(graph_id: str, spec: str) -> tuple[str, str]:
    """The file or module of a graph, and its name there. Raises GraphLoadError."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise GraphLoadError(
            f"Graph {graph_id!r}: {spec!r} is not of the form './file.py:name' or 'package.module:name'."
        )
    return where, name


def is_file(where: str) -> bool:
    """Whether the place of a graph is a file's path, else it is a module's name."""
    return where.endswith(".py") or "/" in where


def read_project(path: Path) -> Project:
    """Read a ``langgraph.json``. Raises GraphLoadError that says what is wrong with it."""
    try:
        data = orjson.loads(path.read_bytes())
        return Project.model_validate({**data, "root": path.parent})
    except FileNotFoundError as error:
        raise GraphLoadError(
            f"There is no {path}. Point SANDFLEET_PROJECT at your langgraph.json."
        ) from error
    except orjson.JSONDecodeError as error:
        raise GraphLoadError(f"{path} is not JSON: {error}") from error
    except TypeError as error:
        raise GraphLoadError(f"{path} is not a langgraph.json: it must be a JSON object.") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise GraphLoadError(f"{path} is not a langgraph.json: {wrong}.") from error


def apply_environment(project: Project) -> None:
    """Set the project's variables; those that are set already win, as with a shell's own."""
    for name, value in project.environment().items():
        os.environ.setdefault(name, value)
