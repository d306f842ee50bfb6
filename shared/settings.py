"""Every setting of every process, read from the environment (prefix ``SANDFLEET_``) and documented here.

Units are in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes`` bytes.
"""

import sys
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from sandfleet.shared.aws_requests import read_secrets
from sandfleet.shared.errors import InvalidSettings
from sandfleet.shared.prices import Price


class Settings(BaseSettings):
    """Settings of one process. Unknown variables with the prefix are ignored, wrong values end the process."""

    model_config = SettingsConfigDict(env_prefix="SANDFLEET_", extra="ignore", populate_by_name=True)

    # --- the three servers -------------------------------------------------------------------------------------
    database_url: str = Field(
        "postgresql://postgres@127.0.0.1:5432/sandfleet",
        validation_alias=AliasChoices("DATABASE_URL", "SANDFLEET_DATABASE_URL"),
        description="PostgreSQL 15 or newer, as a libpq URL. The only authority for runs.",
    )
    database_iam: bool = Field(
        False,
        description="Log in to PostgreSQL on RDS with tokens of IAM; SANDFLEET_DATABASE_URL has no password then.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        validation_alias=AliasChoices("REDIS_URL", "SANDFLEET_REDIS_URL"),
        description="Redis 6.2 or newer, or Valkey, cluster mode off: streams, rings, cancel keys.",
    )
    deployment: str = Field(
        "sandfleet",
        description="Name of the deployment: a dimension of its metrics in CloudWatch, where several may be side by side.",
    )
    admin_secret_arn: str = Field(
        "",
        description="Secret with username and password of the database's administrator; for migrations alone.",
    )
    redis_password: str = Field(
        "",
        repr=False,
        description="Password of Redis, if SANDFLEET_REDIS_URL has none; usually from a secret.",
    )
    secret_arns: list[str] = Field(
        default_factory=list,
        description="Secrets of AWS Secrets Manager as a JSON list of ARNs, each a JSON object of further settings, "
        'e.g. {"redis_password": "…"}; read once, at the start.',
    )
    aws_endpoint_url: str | None = Field(
        None,
        # Ours first: an emulator sets the other one for its tasks, to an address of its own.
        validation_alias=AliasChoices("SANDFLEET_AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL"),
        description="Endpoint of an AWS emulator; empty means AWS itself.",
    )
    aws_region: str = Field(
        "us-east-1",
        validation_alias=AliasChoices("AWS_REGION", "AWS_DEFAULT_REGION", "SANDFLEET_AWS_REGION"),
        description="AWS region of the queues.",
    )
    queue_urls: dict[str, str] = Field(
        default_factory=dict,
        description='SQS queue URL per pool as a JSON object, e.g. {"default": "http://…"}; empty: no permits are sent.',
    )
    log_level: str = Field("INFO", description="Lowest level that is logged.")
    metrics_listen: str = Field(
        "",
        pattern=r"^$|:[0-9]+$",
        description="ADDRESS:PORT, within the deployment only, at which API, executor and host serve /metrics for "
        "Prometheus; empty: they do not.",
    )
    metrics_tenants: int = Field(
        100, ge=0, description="Tenants that a process's metrics name; later ones count as other."
    )
    otlp_endpoint: str = Field(
        "",
        validation_alias=AliasChoices("SANDFLEET_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        pattern=r"^$|^https?://",
        description="URL of an OpenTelemetry collector that takes OTLP over HTTP, e.g. http://127.0.0.1:4318; empty: no "
        "traces are made. The other OTEL_ variables of the SDK hold too.",
    )
    prices: dict[str, Price] = Field(
        default_factory=dict,
        description='Prices by model as JSON, in US dollars for a million tokens, e.g. {"gpt-5": {"input": 1.25, "output": 10, '
        '"cache_read": 0.125}}; a name fits all models that begin with it.',
    )

    # --- API -----------------------------------------------------------------------------------------------------
    api_host: str = Field("127.0.0.1", description="Address that the API listens on.")
    api_port: int = Field(8123, description="TCP port that the API listens on.")
    api_prefix: str = Field(
        "",
        pattern=r"^$|^(/[A-Za-z0-9._~-]+)+$",
        description="What a front puts before each path, e.g. the stage of an API Gateway, /v1: it is taken off.",
    )
    api_pool_size: int = Field(10, ge=1, description="PostgreSQL connections of one API process at most.")
    max_body_bytes: int = Field(
        2 * 1024 * 1024, ge=1024, description="Largest request body; more answers 413."
    )
    max_file_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="Largest file that is sent to a sandbox at once; more answers 413.",
    )
    max_json_depth: int = Field(
        200, ge=8, le=900, description="Deepest nesting of a JSON body; more answers 400."
    )
    sse_heartbeat_s: float = Field(15.0, gt=0, description="Pause between heartbeat comments on a stream.")
    response_window_s: float = Field(
        0.0,
        ge=0,
        description="Longest streaming or waiting response; 0 means no limit. A Lambda buffers, so it sets one.",
    )
    operation_timeout_s: float = Field(
        20.0,
        gt=0,
        description="How long the API waits for an executor to do an operation that needs graph code.",
    )
    disconnect_grace_s: float = Field(
        15.0, ge=0, description="How long on_disconnect=cancel waits for the client to come back."
    )
    idempotency_ttl_s: int = Field(24 * 3600, gt=0, description="How long an Idempotency-Key is remembered.")

    # --- executor ------------------------------------------------------------------------------------------------
    project: Path | None = Field(None, description="Path of the langgraph.json that the executor serves.")
    graphs: list[str] = Field(
        default_factory=list,
        description="Ids of the project's graphs that this executor serves, as a JSON list; empty: all.",
    )
    pool: str = Field("default", description="Pool of runs that this executor works on.")
    slots: int = Field(64, ge=1, description="Runs that one executor process executes at once.")
    executor_pool_size: int = Field(
        8, ge=2, description="PostgreSQL connections of an executor beside the control loop's."
    )
    lease_s: float = Field(
        15.0, gt=0, description="How long a claim holds without renewal, on the database's clock."
    )
    renew_every_s: float = Field(
        5.0,
        gt=0,
        description="Pause between renewals of all leases of an executor; at most a third of lease_s.",
    )
    long_poll_s: int = Field(
        20, ge=1, le=20, description="SQS long poll; a ready run waits at most this long beside a free slot."
    )
    visibility_timeout_s: int = Field(
        60, ge=20, description="Visibility timeout of a permit that is held for a running run."
    )
    cancel_poll_ms: int = Field(
        200, ge=10, description="Pause between looks at the cancel keys of the runs at hand."
    )
    sweep_every_s: float = Field(
        1.0,
        gt=0,
        description="Pause between sweeps of expired leases and due delays; at most a third of lease_s.",
    )
    journal_retention_s: int = Field(
        7 * 24 * 3600,
        gt=0,
        description="How long the events of a run that has ended, and what it used of models, can be read again; of older "
        "ones only the end is kept, and sums of usage by day.",
    )
    usage_retention_s: int = Field(
        400 * 24 * 3600,
        gt=0,
        description="How long the sums of what tenants have used of models are kept, by day.",
    )
    run_timeout_s: float = Field(
        3600.0, gt=0, description="Hard timeout of a run, counted from its first start."
    )
    poison_limit: int = Field(
        5,
        ge=1,
        description="Executor deaths in a row without a new checkpoint that end a run, the last of them alone.",
    )
    drain_grace_s: float = Field(
        10.0, ge=0, description="How long an executor lets runs finish after SIGTERM."
    )

    ecs_metadata_uri: str | None = Field(
        None,
        validation_alias=AliasChoices("ECS_CONTAINER_METADATA_URI_V4", "SANDFLEET_ECS_METADATA_URI"),
        description="Where the ECS task that the executor is can be asked who it is; ECS sets it. While ECS replaces "
        "tasks, those of an older version take no more runs and hand over those that they have.",
    )
    ecs_agent_uri: str | None = Field(
        None,
        validation_alias=AliasChoices("ECS_AGENT_URI", "SANDFLEET_ECS_AGENT_URI"),
        description="The ECS agent of the task that the executor is; ECS sets it. The executor protects its task from "
        "scale-in while it executes runs.",
    )

    # --- streams -------------------------------------------------------------------------------------------------
    stream_ttl_s: int = Field(
        3600, gt=0, description="Time to live of a run's stream in Redis after its last event."
    )
    stream_max_entries: int = Field(10_000, ge=100, description="Entries that a run's stream keeps in Redis.")
    flush_pause_ms: float = Field(
        5.0, ge=0, description="Pause between flushes of token deltas, which gathers them into one entry."
    )

    # --- limits of a tenant without a plan of its own ------------------------------------------------------------
    tenant_max_in_flight: int = Field(
        1_000, ge=1, description="Runs of a tenant that may be ready or running at once."
    )
    tenant_max_queued: int = Field(
        100_000, ge=1, description="Runs of a tenant that may wait; more answers 429."
    )

    tenant_max_sandboxes: int = Field(
        100, ge=0, description="Sandboxes without a run that a tenant may have at once; more answers 429."
    )

    # --- sandboxes -----------------------------------------------------------------------------------------------
    sandbox: str = Field(
        "docker",
        pattern="^(docker|bwrap)$",
        description="Backend: docker, or bwrap for development without an engine.",
    )
    templates: Path | None = Field(
        None,
        description="Path of the sandfleet.toml with the sandbox templates, the same for executors and hosts; default: "
        "the one beside SANDFLEET_PROJECT, else the default template alone.",
    )
    host_socket: Path = Field(
        Path(".sandfleet/host.sock"), description="Unix socket of the sandbox host on this machine."
    )
    host_id: str = Field("", description="Name of the sandbox host among all; default: MACHINE/INSTANCE.")
    host_listen: str = Field(
        "",
        pattern=r"^$|:[0-9]+$",
        description="ADDRESS:PORT at which the sandbox host serves executors on other machines; empty: it does not.",
    )
    host_address: str = Field(
        "",
        pattern=r"^$|^http://",
        description="URL at which they reach it; default: SANDFLEET_HOST_LISTEN, by the machine's name if that is 0.0.0.0.",
    )
    host_secret: str = Field(
        "", repr=False, description="Key that signs and checks sandbox tokens; shared by executors and hosts."
    )
    host_dir: Path = Field(
        Path(".sandfleet/host"), description="Folder of the sandbox host: sockets and workspaces."
    )
    docker_host: str = Field(
        "unix:///var/run/docker.sock",
        validation_alias=AliasChoices("DOCKER_HOST", "SANDFLEET_DOCKER_HOST"),
        description="Docker Engine that the sandbox host uses.",
    )
    docker_runtime: str = Field(
        "", description="Container runtime, e.g. runsc; empty means the engine's default."
    )
    sandbox_image: str = Field(
        "sandfleet-sandbox:latest", description="Image of the default sandbox template."
    )
    sandbox_memory_bytes: int = Field(
        512 * 1024 * 1024, ge=16 * 1024 * 1024, description="Memory of a sandbox, swap included."
    )
    sandbox_cpus: float = Field(1.0, gt=0, description="CPUs that a sandbox may use.")
    sandbox_pids: int = Field(256, ge=8, description="Processes and threads in a sandbox.")
    sandbox_workspace_bytes: int = Field(
        256 * 1024 * 1024, ge=1024 * 1024, description="Size of a sandbox's workspace."
    )
    sandbox_output_bytes: int = Field(
        1024 * 1024,
        ge=1024,
        description="Output of one command that is kept; the rest is counted and dropped.",
    )
    sandbox_command_timeout_s: float = Field(
        120.0, gt=0, description="Time limit of one command unless the call names one."
    )
    host_sandboxes: int = Field(1000, ge=1, description="Sandboxes that a host takes at once at most.")
    host_memory_bytes: int = Field(
        0,
        ge=0,
        description="Sum of the memory limits of a host's sandboxes; 0 means four times the machine's memory.",
    )
    host_pids: int = Field(
        0,
        ge=0,
        description="Sum of the process limits of a host's sandboxes; 0 means four times what the kernel allows.",
    )
    host_disk_bytes: int = Field(
        0,
        ge=0,
        description=(
            "Sum of the workspaces on disk of a host's sandboxes; 0 means what the file system of SANDFLEET_HOST_DIR has free."
        ),
    )
    warm_sandboxes: int = Field(
        0,
        ge=0,
        description="Sandboxes of the default template that a host keeps started and frozen, for who needs one next.",
    )
    warm_refill_per_s: float = Field(
        5.0, gt=0, description="Warm sandboxes that a host starts in a second at most."
    )
    warm_age_s: float = Field(600.0, gt=0, description="Age at which an unused warm sandbox is replaced.")
    reap_every_s: float = Field(
        30.0, gt=0, description="Pause between looks of a host for what hosts that are gone have left behind."
    )
    reap_grace_s: float = Field(
        120.0,
        gt=0,
        description="How long a host must have been silent before others remove what it left.",
    )
    host_drain_grace_s: float = Field(
        60.0, ge=0, description="How long a sandbox host lets commands go on after SIGTERM."
    )
    host_save_s: float = Field(
        30.0,
        ge=0,
        description="How long a sandbox host may take after that to keep workspaces; what is not kept by then is lost.",
    )
    network_pool: IPv4Network = Field(
        IPv4Network("10.253.240.0/20"),
        description="Private range of the networks of sandboxes with the policy egress, a /28 each; no route of the "
        "host may overlap it.",
    )
    sandbox_dns: list[IPv4Address] = Field(
        [IPv4Address("1.1.1.1"), IPv4Address("8.8.8.8")],
        min_length=1,
        description='Public name servers of sandboxes with the policy egress, as JSON, e.g. ["9.9.9.9"].',
    )
    sandbox_lifetime_s: float = Field(3600.0, gt=0, description="Longest life of a sandbox.")
    snapshot_bucket: str = Field(
        "", description="S3 bucket that keeps snapshots of workspaces; empty: none are taken."
    )
    snapshot_bytes: int = Field(
        256 * 1024 * 1024, ge=1024, description="Largest snapshot, compressed; what is larger is refused."
    )
    tenant_max_snapshots: int = Field(
        1000, ge=0, description="Snapshots on request that a tenant may keep at once; more answers 429."
    )
    snapshot_keep_s: float = Field(7 * 24 * 3600.0, gt=0, description="How long a snapshot is kept.")

    @field_validator("aws_endpoint_url", mode="after")
    @classmethod
    def _empty_is_none(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="after")
    def _with_password(self) -> Self:
        """What connects to Redis knows the URL alone."""
        parts = urlsplit(self.redis_url)
        if self.redis_password and parts.password is None:
            host = parts.netloc.rpartition("@")[2]
            login = f"{parts.username or ''}:{quote(self.redis_password, safe='')}"
            self.redis_url = urlunsplit(parts._replace(netloc=f"{login}@{host}"))
        return self

    @model_validator(mode="after")
    def _often_enough(self) -> Self:
        """A lease must survive a renewal that fails, and a sweep that comes late must not look like a database that was
        away: it takes a pause of half a lease for that, and then no lease would ever expire."""
        for name in ("renew_every_s", "sweep_every_s"):
            value = getattr(self, name)
            if value * 3 > self.lease_s:
                raise ValueError(
                    f"SANDFLEET_{name.upper()} is {value:g} and must be at most a third of SANDFLEET_LEASE_S, which is "
                    f"{self.lease_s:g}: lower the one or raise the other."
                )
        return self


def read_settings() -> Settings:
    """The settings in the environment, and in the secrets that it names. Raises InvalidSettings."""
    try:
        found = Settings()  # type: ignore[call-arg, unused-ignore]
        if not found.secret_arns:
            return found
        more = read_secrets(found.secret_arns, found.aws_region, found.aws_endpoint_url)
        if unknown := more.keys() - Settings.model_fields.keys():
            raise InvalidSettings(
                f"A secret of SANDFLEET_SECRET_ARNS has {min(unknown)!r}, which is no setting."
            )
        return Settings(**more)
    except ValidationError as error:
        raise InvalidSettings("; ".join(_explained(problem) for problem in error.errors())) from None


def _explained(problem: ErrorDetails) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    return f"{name if name.isupper() else f'SANDFLEET_{name.upper()}'}: {message}"


@cache
def settings() -> Settings:
    """The settings of this process, read once. Wrong ones end it, with a line that says which."""
    try:
        return read_settings()
    except InvalidSettings as error:
        sys.exit(f"{error.code}: {error.message}")
