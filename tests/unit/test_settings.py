"""Settings say what they are and in which unit, fit each other, and what is wrong with them is said in a line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from sandfleet.shared.errors import InvalidSettings
from sandfleet.shared.scaling.settings import ScalerSettings, Target, read_scaler_settings
from sandfleet.shared.settings import Settings

UNITS = ("_s", "_ms", "_bytes", "_per_s")
# Numbers without a unit: of things that the name says.
_COUNTED = (
    "port",
    "size",
    "depth",
    "limit",
    "entries",
    "flight",
    "queued",
    "cpus",
    "pids",
    "slots",
    "sandboxes",
    "snapshots",
    "tenants",
    "least",
    "most",
    "fraction",
)
DOCUMENTED = [Settings, ScalerSettings, Target]


@pytest.mark.parametrize("kind", DOCUMENTED)
def test_every_setting_is_described(kind: type[BaseModel]) -> None:
    """Red for one without a description."""
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("kind", DOCUMENTED)
def test_every_number_names_its_unit(kind: type[BaseModel]) -> None:
    """Red for a duration or a size that one has to guess."""
    numbers = [name for name, field in kind.model_fields.items() if field.annotation in (int, float)]
    assert [name for name in numbers if not name.endswith(UNITS + _COUNTED)] == []


def test_the_readme_tells_the_defaults() -> None:
    """Red when a default is changed in one place only."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    told = re.findall(r"^\| `SANDFLEET_(\w+)` \| ([0-9.]+) \|", text, re.MULTILINE)
    assert len(told) >= 4
    for name, default in told:
        assert Settings.model_fields[name.lower()].default == float(default), name


@pytest.mark.parametrize("name", ["renew_every_s", "sweep_every_s"])
def test_what_must_happen_often_within_a_lease_is_held_to_it(name: str) -> None:
    """Red without the check: leases would never expire, or always. The message says what to change."""
    with pytest.raises(ValidationError, match=f"SANDFLEET_{name.upper()} is 3 and must be at most a third"):
        Settings(lease_s=8.9, **{"renew_every_s": 1.0, name: 3.0})  # type: ignore[arg-type]
    assert Settings(lease_s=9.0, **{"renew_every_s": 1.0, name: 3.0}).lease_s == 9.0  # type: ignore[arg-type]


def test_wrong_settings_end_a_process_with_a_line_for_each() -> None:
    """Red when they show as a traceback."""
    code = "from sandfleet.shared.settings import settings; settings()"
    env = {**os.environ, "SANDFLEET_SLOTS": "none", "AWS_ENDPOINT_URL": "", "SANDFLEET_POISON_LIMIT": "0"}
    ended = subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("invalid_settings: SANDFLEET_SLOTS: Input should be a valid integer")
    assert "; SANDFLEET_POISON_LIMIT: Input should be greater than or equal to 1" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (
            '{"default": {"most": 3}}',
            "SANDFLEET_SCALER_TARGETS in default: a target is either a service or a group",
        ),
        ('{"default": {"group": "g", "least": 3, "most": 2}}', "in default: least is 3 and most 2"),
        ('{"default": {"service": "name"}}', "SANDFLEET_SCALER_TARGETS in default.service: "),
    ],
)
def test_a_wrong_target_of_the_scaler_is_named(
    monkeypatch: pytest.MonkeyPatch, targets: str, said: str
) -> None:
    """Red when the pool is not said, or when it is noticed at the first evaluation only."""
    monkeypatch.setenv("SANDFLEET_SCALER_TARGETS", targets)
    with pytest.raises(InvalidSettings, match=re.escape(said)):
        read_scaler_settings()
