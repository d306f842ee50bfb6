"""Settings of the scaler, read from the environment (prefix ``SANDFLEET_SCALER_``). Units are in the names: ``_s`` seconds."""

import sys
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from sandfleet.shared.errors import InvalidSettings
from sandfleet.shared.scaling.decision import Policy


class Target(BaseModel):
    """What runs a pool's executors, and how many of them there may be."""

    model_config = ConfigDict(extra="forbid")

    service: str = Field("", pattern="^$|^[^/]+/[^/]+$", description="ECS service, as CLUSTER/SERVICE.")
    group: str = Field("", description="Auto Scaling group of hosts.")
    least: int = Field(0, ge=0, description="Tasks or hosts that are always there.")
    most: int = Field(10, ge=1, description="Tasks or hosts at most.")
    slots: int = Field(64, ge=1, description="Runs that one task, or one host, executes at once.")

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if bool(self.service) == bool(self.group):
            raise ValueError("a target is either a service or a group: name one of them.")
        if self.least > self.most:
            raise ValueError(f"least is {self.least} and most {self.most}: lower the one or raise the other.")
        return self


class ScalerSettings(BaseSettings):
    """When a pool gets more executors and when fewer. The defaults are those that ``docs/scaling.md`` found best."""

    model_config = SettingsConfigDict(env_prefix="SANDFLEET_SCALER_", extra="ignore", populate_by_name=True)

    targets: dict[str, Target] = Field(
        default_factory=dict,
        description='What runs each pool, as a JSON object, e.g. {"default": {"service": "sandfleet/executors", "least": 0, '
        '"most": 20, "slots": 64}, "hosts": {"group": "sandfleet-hosts", "most": 10, "slots": 128}}.',
    )
    sets_counts: bool = Field(
        False,
        description="The fast path: the scaler sets the counts of tasks and hosts itself, several times a minute. Else it "
        "publishes metrics once per call, and alarms on them drive the fleet.",
    )
    every_s: float = Field(
        10.0, gt=0, description="Pause between two evaluations on the fast path; 10 makes six a minute."
    )
    window_s: float = Field(
        55.0,
        gt=0,
        description="How long a call goes on evaluating on the fast path: until the next one comes.",
    )
    age_s: float = Field(
        5.0, ge=0, description="Age of the oldest ready run from which a pool gets more executors."
    )
    drain_s: float = Field(
        60.0, gt=0, description="Time in which a backlog may be worked off once there are enough executors."
    )
    fill_fraction: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Share of the slots that may be taken after a pool got fewer executors; the rest is for noise.",
    )
    pause_s: float = Field(
        20.0, ge=0, description="Pause after a pool got more executors before it gets more again."
    )
    in_after_s: float = Field(
        300.0,
        ge=0,
        description="How long a pool must have had too much room, without a break, before it gets fewer executors.",
    )
    run_s: float = Field(
        30.0, gt=0, description="Duration that a run is taken to have until some have ended."
    )

    def policy(self, target: Target) -> Policy:
        """The decision's parameters for a pool."""
        return Policy(
            least=target.least,
            most=target.most,
            slots=target.slots,
            age_s=self.age_s,
            drain_s=self.drain_s,
            fill=self.fill_fraction,
            pause_s=self.pause_s,
            in_after_s=self.in_after_s,
            run_s=self.run_s,
        )


def read_scaler_settings() -> ScalerSettings:
    """The settings in the environment. Raises InvalidSettings."""
    try:
        return ScalerSettings()  # type: ignore[call-arg, unused-ignore]
    except ValidationError as error:
        raise InvalidSettings("; ".join(_explained(problem) for problem in error.errors())) from None


def _explained(problem: ErrorDetails) -> str:
    name, *within = (str(part) for part in problem["loc"])
    place = f" in {'.'.join(within)}" if within else ""
    return f"SANDFLEET_SCALER_{name.upper()}{place}: {problem['msg'].removeprefix('Value error, ')}"


def scaler_settings() -> ScalerSettings:
    """The settings of this process. Wrong ones end it, with a line that says which."""
    try:
        return read_scaler_settings()
    except InvalidSettings as error:
        sys.exit(f"{error.code}: {error.message}")
