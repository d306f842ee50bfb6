"""What a deployment is to be: the context of ``cdk.json`` and of ``cdk -c key=value``, validated."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from sandfleet.infra_cdk.sizes import SIZES, Size

ROOT = Path(__file__).resolve().parent.parent
"""The repository: paths in the context are relative to it."""
TEMPLATES: Final = "sandfleet.toml"
"""The file with the sandbox templates, beside ``langgraph.json``."""


class WrongContext(Exception):
    """The context cannot be deployed. The message names each key and what to do."""


class Deployment(BaseModel):
    """One deployment. Each field is a key of the context, written in camel case."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    name: str = Field("sandfleet", pattern=r"^[a-z][a-z0-9-]{0,23}$")
    """Prefix of the stacks' names; deployments of different names stand side by side in an account."""
    size: Literal["dev", "small", "large"] = "dev"
    """Which column of `sizes.SIZES`."""
    fleet: Literal["fargate", "hosts", "both"] = "fargate"
    """``fargate``: executors without sandboxes; ``hosts``: executors and sandboxes on Docker hosts; ``both``: executors on
    each, and those on Fargate use the sandboxes of the hosts."""
    project: Path = ROOT / "examples" / "langgraph.json"
    """The user's ``langgraph.json``."""
    host_graphs: tuple[str, ...] = ()
    """With the fleet ``both``: the graphs whose runs go to the hosts' executors; the others go to Fargate."""
    database: Literal["rds", "aurora"] = "rds"
    """RDS PostgreSQL, or Aurora Serverless v2."""
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    """Of Lambdas, executors, gateway and hosts."""
    python: Literal["3.11", "3.12", "3.13", "3.14"] = "3.13"
    """Of Lambdas and images."""
    spot: bool = False
    """Executors on Fargate Spot, and hosts on Spot instances: cheaper, and drained when AWS wants them back."""
    zones: tuple[str, ...] = ()
    """Names of as many availability zones as the size has; empty: the first ones of the region."""
    warm_hosts: int = Field(0, ge=0, le=100)
    """Docker hosts that are stopped and ready beside those that run: they start in half the time, and cost their disks."""
    fast_scaling: bool | None = None
    """The scaler sets the counts of tasks and hosts itself, six times a minute; else alarms do, once a minute. Default: as the size
    says."""
    scale_to_zero: bool = False
    """No executors and no hosts while there is no work: the first run then waits for one to start. It takes `fast_scaling`."""
    waf: bool = False
    """A web application firewall before the API: AWS' common rules and a rate per address."""
    api_logs_role: Literal["own", "existing"] = "own"
    """API Gateway writes logs with one role for the whole account in a region. ``own``: this deployment sets one;
    ``existing``: the account has one, which stays."""
    alarm_email: str = Field("", pattern=r"^$|^[^@\s]+@[^@\s]+$")
    """Where alarms go; empty: only to the topic."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the executors, for the graphs."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Secret variables of the executors: name → ``SECRET:KEY``, a key of a JSON secret in Secrets Manager."""
    images: dict[Literal["executor", "gateway", "host", "sandbox", "collector"], str] = Field(
        default_factory=dict
    )
    """Images that exist already, by part; what is not named is built, but for ``collector``: without one there is none."""
    otlp_endpoint: str = Field("", pattern=r"^$|^https?://\S+$")
    """Collector elsewhere that gets the spans of gateway, executors and hosts, by OTLP over HTTP."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Settings of sandfleet, or of OpenTelemetry's SDK, for all processes: variables ``SANDFLEET_…`` and ``OTEL_…``."""
    protect: bool | None = None
    """Whether database, bucket and load balancer refuse to be deleted; default: all sizes but ``dev``."""

    @field_validator("host_graphs", "environment", "secrets", "images", "settings", "zones", mode="before")
    @classmethod
    def _from_command_line(cls, value: Any) -> Any:
        """``-c`` gives text: JSON, or for a list names with commas."""
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith(("[", "{")):
            return json.loads(value)
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("project", mode="after")
    @classmethod
    def _there(cls, path: Path) -> Path:
        path = path if path.is_absolute() else ROOT / path
        if not path.is_file():
            raise ValueError(f"there is no {path}: give the path of your langgraph.json")
        return path.resolve()

    @field_validator("secrets", mode="after")
    @classmethod
    def _with_key(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, source in secrets.items():
            if not all(source.rpartition(":")[::2]):
                raise ValueError(f"{variable}: write SECRET:KEY, not {source!r}")
        return secrets

    @model_validator(mode="after")
    def _graphs(self) -> Self:
        known = self.graphs
        if unknown := set(self.host_graphs) - set(known):
            raise ValueError(
                f"hostGraphs names {min(unknown)!r}, but {self.project.name} has {', '.join(known)}"
            )
        if self.host_graphs and self.fleet != "both":
            raise ValueError(
                "hostGraphs is for the fleet both; with one kind of executors all graphs are theirs"
            )
        if self.fleet == "both" and not set(self.host_graphs) < set(known):
            raise ValueError("hostGraphs names all graphs: use the fleet hosts")
        if self.fleet == "both" and not self.host_graphs:
            raise ValueError(
                f"the fleet both divides the graphs: name in hostGraphs those that run on hosts, of {', '.join(known)}"
            )
        return self

    @field_validator("settings", mode="after")
    @classmethod
    def _ours(cls, settings: dict[str, str]) -> dict[str, str]:
        for name in settings:
            if not name.startswith(("SANDFLEET_", "OTEL_")):
                raise ValueError(
                    f"{name} is no setting of sandfleet; variables of graphs are for the key environment"
                )
        return settings

    @model_validator(mode="after")
    def _enough_zones(self) -> Self:
        wanted = SIZES[self.size].zones
        if self.zones and len(set(self.zones)) != wanted:
            raise ValueError(
                f"zones names {len(set(self.zones))} of the {wanted} that the size {self.size} has"
            )
        return self

    @model_validator(mode="after")
    def _one_collector(self) -> Self:
        if self.otlp_endpoint and "collector" in self.images:
            raise ValueError(
                "otlpEndpoint and the image collector exclude each other: name one place for spans"
            )
        return self

    @model_validator(mode="after")
    def _from_zero(self) -> Self:
        if self.scale_to_zero and self.fast_scaling is False:
            raise ValueError(
                "scaleToZero takes fastScaling: alarms leave the last executor, whose slots are free"
            )
        return self

    @model_validator(mode="after")
    def _warm(self) -> Self:
        if self.warm_hosts and not self.has_hosts:
            raise ValueError("warmHosts is for the fleets hosts and both: there are no Docker hosts")
        if self.warm_hosts and self.spot:
            raise ValueError(
                "warmHosts and spot exclude each other: AWS keeps no Spot instances in a warm pool"
            )
        return self

    @model_validator(mode="after")
    def _templates(self) -> Self:
        path = self.project.parent / TEMPLATES
        if path.is_file():
            settings = tuple(sorted({**self.environment, **self.settings}.items()))
            said = _wrong_templates(self.project, path.read_bytes(), self.graphs, settings)
            if said:
                raise ValueError(said)
        return self

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graphs' ids, in the project's order."""
        try:
            graphs = json.loads(self.project.read_bytes())["graphs"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.project} is not a langgraph.json with graphs ({type(error).__name__})"
            ) from None
        if not isinstance(graphs, dict) or not graphs:
            raise ValueError(f"{self.project} names no graphs")
        return tuple(graphs)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that have executors, each with a queue of its own."""
        return {"fargate": ("default",), "hosts": ("hosts",), "both": ("default", "hosts")}[self.fleet]

    def graphs_of(self, pool: str) -> tuple[str, ...]:
        """The graphs whose runs go to a pool."""
        if self.fleet != "both":
            return self.graphs
        return tuple(g for g in self.graphs if (g in self.host_graphs) == (pool == "hosts"))

    @property
    def scales_fast(self) -> bool:
        """Whether the scaler sets counts, or alarms."""
        if self.fast_scaling is None:
            return self.scale_to_zero or SIZES[self.size].fast_scaling
        return self.fast_scaling

    @property
    def figures(self) -> Size:
        """The figures of the size, as the rest of the context changes them."""
        size = SIZES[self.size]
        return size.from_zero() if self.scale_to_zero else size

    @property
    def has_hosts(self) -> bool:
        """Whether there are Docker hosts."""
        return self.fleet != "fargate"

    @property
    def kept(self) -> bool:
        """Whether a last snapshot of the database, and the bucket, stay when the stacks are removed. `protect` only says
        whether they can be removed."""
        return self.size != "dev"

    @property
    def protected(self) -> bool:
        """Whether what holds data refuses to be deleted."""
        return self.kept if self.protect is None else self.protect


@cache
def _wrong_templates(
    project: Path, _content: bytes, graphs: tuple[str, ...], settings: tuple[tuple[str, str], ...]
) -> str:
    """What ``sandfleet templates`` would say against the file beside a project; empty: nothing."""
    env = {"PATH": os.environ.get("PATH", ""), **dict(settings), "SANDFLEET_PROJECT": str(project)}
    argv = [sys.executable, "-P", "-m", "sandfleet.shared.check_templates", *graphs]
    checked = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    return checked.stderr.strip() if checked.returncode else ""


def read_deployment(context: Mapping[str, Any]) -> Deployment:
    """The deployment that a context describes. Keys of CDK's own (``@aws-cdk/…``, ``aws:…``) are passed over.

    Raises WrongContext.
    """
    own = {k: v for k, v in context.items() if not k.startswith(("@", "aws:", "cdk-", "availability-zones:"))}
    try:
        return Deployment.model_validate(own)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'context'}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        ]
        known = ", ".join(to_camel(name) for name in Deployment.model_fields)
        raise WrongContext("\n".join([*problems, f"The keys are {known}; see docs/deploy.md."])) from None
