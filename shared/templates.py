"""Sandbox templates: what ``sandfleet.toml``, beside ``langgraph.json``, says about images, networks and limits.

Without the file there is one template, ``default``, made of the settings; ``docs/templates.md`` describes the file.
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from sandfleet.shared.errors import InvalidRequest, SandfleetError
from sandfleet.shared.settings import Settings

FILE_NAME = "sandfleet.toml"
DEFAULT = "default"
CONFIG_KEY = "sandbox_template"
"""Of a run's ``configurable``: the template that its caller wishes."""

_TMP_BYTES = 64 * 1024 * 1024
_DISK_AT_LEAST = 16 * 1024 * 1024  # a file system has tables of its own
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_DOMAIN = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9-]{2,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Size = Annotated[ByteSize, Field(ge=1024)]


class TemplatesInvalid(SandfleetError):
    """The file with the templates cannot be used; the message names the place and what to write."""

    code = "templates_invalid"


class TemplateRefused(InvalidRequest):
    """A run may not have the sandbox template that its caller asked for."""

    code = "template_refused"


class Template(BaseModel):
    """What a sandbox is made of and may use up. Sizes in bytes, in the file also as ``"512MiB"``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    image: str = Field(min_length=1)
    """An image with Python 3.9 or newer; it needs nothing else."""
    runtime: str = ""
    """Container runtime, e.g. ``runsc``; empty means the engine's default."""
    network: Literal["none", "egress", "allowlist"] = "none"
    """``none``, ``egress`` (the internet and nothing near), or ``allowlist`` (``domains``, through a proxy)."""
    domains: tuple[str, ...] = ()
    """Names that ``allowlist`` opens; ``*.example.com`` means all below ``example.com``, and not that itself."""
    memory: Size
    """Of all processes, the workspace and the other writable folders together, swap included."""
    cpus: float = Field(gt=0)
    pids: int = Field(ge=8)
    """Processes and threads."""
    workspace: Size
    """Of /workspace."""
    workspace_on: Literal["memory", "disk"] = "memory"
    """Where the workspace is; on disk it is a file of that size at most, made by the sandbox host."""
    disk_rate: Size = ByteSize(100 * 2**20)
    """Bytes a second that a workspace on disk may read, and as many again that it may write (that on cgroup v2 only)."""
    disk_iops: int = Field(2000, ge=10)
    """Requests a second that a workspace on disk may read, and as many again that it may write."""
    inodes: int = Field(65_536, ge=16)
    """Files in the workspace: bounds the kernel's memory that empty files take."""
    open_files: int = Field(4096, ge=64)
    """Open files of one process."""
    output: Size
    """Of one command; the rest is counted and dropped."""
    command_timeout_s: float = Field(gt=0)
    """Time limit of a command unless the call names one."""
    lifetime_s: float = Field(gt=0)
    """Longest life of a sandbox."""
    idle_s: float | None = Field(None, gt=0)
    """How long a sandbox may be without a call and without a process of the run before it is ended; None: that never ends it."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables of every command."""
    warm: int = Field(0, ge=0, le=1000)
    """Sandboxes that a host keeps ready for runs to come."""

    @property
    def disk(self) -> int:
        """Bytes of its host's disk that a sandbox may fill."""
        return self.workspace if self.workspace_on == "disk" else 0

    @property
    def tmp(self) -> int:
        """Size of /tmp in bytes."""
        return min(_TMP_BYTES, self.workspace)

    @field_validator("domains")
    @classmethod
    def _names(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        lower = tuple(domain.lower() for domain in domains)
        for domain in lower:
            if _DOMAIN.fullmatch(domain) is None or domain.rpartition(".")[2].isdigit():
                raise ValueError(
                    f"{domain!r} is no domain: write names such as api.example.com or *.example.com"
                )
        return lower

    @field_validator("env")
    @classmethod
    def _variables(cls, env: Mapping[str, str]) -> Mapping[str, str]:
        for name in env:
            if _VARIABLE.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of a variable")
        return env

    @model_validator(mode="after")
    def _fits(self) -> Self:
        on_disk = self.workspace_on == "disk"
        if on_disk and self.workspace < _DISK_AT_LEAST:
            raise ValueError(f"a workspace on disk needs {_DISK_AT_LEAST // 2**20} MiB at least")
        if on_disk and self.tmp >= self.memory:
            raise ValueError(f"memory ({self.memory} bytes) must exceed /tmp ({self.tmp}), which is in it")
        if not on_disk and self.workspace + self.tmp >= self.memory:
            raise ValueError(
                f"memory ({self.memory} bytes) must exceed the workspace and /tmp ({self.workspace} + {self.tmp}): "
                'both are in memory, unless workspace_on = "disk"'
            )
        if (self.network == "allowlist") != bool(self.domains):
            raise ValueError("network = 'allowlist' and domains need each other")
        return self


class GraphTemplates(BaseModel):
    """Which template the runs of a graph get, and which others their callers may ask for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    template: str = DEFAULT
    choices: tuple[str, ...] = ()

    @property
    def offered(self) -> list[str]:
        """What runs of the graph may have; the first is what they get unless they ask."""
        return list(dict.fromkeys((self.template, *self.choices)))


class Templates(BaseModel):
    """All templates of a deployment by name, and what the graphs may use. ``default`` is always there."""

    model_config = ConfigDict(frozen=True)

    templates: Mapping[str, Template]
    graphs: Mapping[str, GraphTemplates] = Field(default_factory=dict)

    def check_graphs(self, known: Collection[str]) -> None:
        """Raise TemplatesInvalid if the file speaks of a graph that the project does not have: a typing error."""
        if unknown := self.graphs.keys() - known:
            raise TemplatesInvalid(
                f"{FILE_NAME} has [graphs.{min(unknown)}], but langgraph.json has no such graph: it has "
                f"{', '.join(sorted(known))}."
            )

    def of_run(self, graph_id: str, wish: object = None) -> str:
        """Name of the template for a run; ``wish`` is what its caller asked for (``configurable.sandbox_template``).

        Raises TemplateRefused unless the file offers the wish for this graph.
        """
        return choose(graph_id, self.offered(graph_id), wish)

    def offered(self, graph_id: str) -> list[str]:
        """The templates that runs of a graph may have, the one that they get unless they ask first."""
        return self.graphs.get(graph_id, GraphTemplates()).offered


def choose(graph_id: str, offered: list[str], wish: object) -> str:
    """The template for a run whose caller asked for ``wish``, or for none (None). Raises TemplateRefused."""
    if wish is None:
        return offered[0]
    if not isinstance(wish, str) or wish not in offered:
        raise TemplateRefused(
            f"config.configurable.{CONFIG_KEY}: runs of graph {graph_id!r} may have {', '.join(offered)}. Choose one of "
            f"these, or offer another in {FILE_NAME} ([graphs.{graph_id}] choices)."
        )
    return wish


def read_templates(settings: Settings) -> Templates:
    """The templates of ``SANDFLEET_TEMPLATES``, or of the file beside ``SANDFLEET_PROJECT``, or the default alone.

    Raises TemplatesInvalid that says what is wrong with the file.
    """
    path = settings.templates
    if path is None and settings.project is not None and (beside := templates_beside(settings.project)):
        path = beside
    if path is None:
        return Templates(templates={DEFAULT: _default(settings)})
    try:
        with path.open("rb") as file:
            return _parse(tomllib.load(file), settings)
    except FileNotFoundError as error:
        raise TemplatesInvalid(f"There is no {path}, which SANDFLEET_TEMPLATES names.") from error
    except tomllib.TOMLDecodeError as error:
        raise TemplatesInvalid(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise TemplatesInvalid(f"{path} is not UTF-8, as TOML must be: {error.reason}") from error
    except ValueError as error:
        raise TemplatesInvalid(f"{path}: {error}") from error


def templates_beside(project: Path) -> Path | None:
    """The file with the templates beside a ``langgraph.json``, if there is one."""
    path = project.parent / FILE_NAME
    return path if path.is_file() else None


def _parse(data: dict[str, Any], settings: Settings) -> Templates:
    if unknown := data.keys() - {"templates", "graphs"}:
        raise ValueError(f"unknown table {min(unknown)!r}: only [templates.NAME] and [graphs.ID] are known")
    given = data.get("templates", {})
    graphs = data.get("graphs", {})
    if not isinstance(given, dict) or not isinstance(graphs, dict):
        raise ValueError("templates and graphs must be tables: [templates.NAME], [graphs.ID]")
    templates = {DEFAULT: _default(settings)}
    for name, fields in given.items():
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no name of a template: use a-z, 0-9, - and _, at most 63")
        if not isinstance(fields, dict) or "name" in fields:
            raise ValueError(
                f"{name!r} in [templates] is neither a template nor one's key: write [templates.{name}] and its keys below it, "
                "without 'name'"
            )
        try:
            templates[name] = Template.model_validate(
                {**_settings(settings, default=name == DEFAULT), "name": name, **fields}
            )
        except ValidationError as error:
            raise ValueError(f"[templates.{name}] {_where(error, Template)}") from error
    chosen = {}
    for graph_id, fields in graphs.items():
        try:
            chosen[graph_id] = GraphTemplates.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"[graphs.{graph_id}] {_where(error, GraphTemplates)}") from error
    for graph_id, rules in chosen.items():
        if missing := {rules.template, *rules.choices} - templates.keys():
            raise ValueError(f"[graphs.{graph_id}] names the template {min(missing)!r}, which is not defined")
    return Templates(templates=templates, graphs=chosen)


_SAID = {
    "tuple_type": 'write a list: ["…"]',
    "byte_size": 'write bytes, or a text such as "512MiB"',
    "byte_size_unit": 'write bytes, or a text such as "512MiB"',
    "model_type": "must be a table",
}
"""What to write, by pydantic's name of the mistake, where its own words are about Python."""


def _where(error: ValidationError, of: type[BaseModel]) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    said = _SAID.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == "extra_forbidden":
        said = f"unknown key; known are {', '.join(name for name in of.model_fields if name != 'name')}"
    return f"{place}: {said}" if place else said


def _default(settings: Settings) -> Template:
    try:
        return Template.model_validate({**_settings(settings, default=True), "name": DEFAULT})
    except ValidationError as error:
        raise TemplatesInvalid(
            f"The settings of sandboxes (SANDFLEET_SANDBOX_MEMORY_BYTES and its like) cannot be used: {_where(error, Template)}"
        ) from error


def _settings(settings: Settings, *, default: bool = False) -> dict[str, Any]:
    """What a template that leaves a value out gets."""
    return {
        "image": settings.sandbox_image,
        "runtime": settings.docker_runtime,
        "memory": settings.sandbox_memory_bytes,
        "cpus": settings.sandbox_cpus,
        "pids": settings.sandbox_pids,
        "workspace": settings.sandbox_workspace_bytes,
        "output": settings.sandbox_output_bytes,
        "command_timeout_s": settings.sandbox_command_timeout_s,
        "lifetime_s": settings.sandbox_lifetime_s,
        "warm": settings.warm_sandboxes if default else 0,
    }
