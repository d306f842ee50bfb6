"""Templates, synthesized once for the session; CI may run tests in two processes, so this folder's stay together."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CONTEXTS = {
    # All there is, with a hot standby and RDS Proxy.
    "both": {
        "size": "small",
        "fleet": "both",
        "hostGraphs": "coder",
        "waf": True,
        "alarmEmail": "a@example.com",
        "warmHosts": 2,
        "fastScaling": False,
        "zones": "eu-central-1b,eu-central-1c",
        "images": {
            part: f"111122223333.dkr.ecr.eu-central-1.amazonaws.com/acme/{part}:1"
            for part in ("executor", "gateway", "host", "sandbox", "collector")
        },
    },
    # The other choices, and no proxy.
    "hosts": {
        "size": "dev",
        "fleet": "hosts",
        "database": "aurora",
        "spot": True,
        "fastScaling": True,
        "otlpEndpoint": "http://collector.acme.internal:4318",
        "settings": {"SANDFLEET_LOG_LEVEL": "WARNING"},
        "protect": True,
        "architecture": "arm64",
    },
}
"""Between them they have every construct."""
PLAIN = {"dev": {"size": "dev", "fleet": "fargate"}}
"""What a newcomer deploys; it goes to the emulator."""
CHANGED = {"changed": {**PLAIN["dev"], "apiLogsRole": "existing", "constants": {"STREAM_TIMEOUT_MS": 60_000}}}
"""The same of another release, in an account that has a role for the logs of API Gateway."""
LARGE = {
    "large": {
        "size": "large",
        "fleet": "both",
        "hostGraphs": "coder",
        "database": "aurora",
        "scaleToZero": True,
    }
}
"""The largest, with RDS Proxy before Aurora; it may have nobody while there is no work."""


@dataclass(frozen=True)
class Template:
    """One stack's template."""

    name: str
    body: dict[str, Any]

    def of_type(self, kind: str) -> dict[str, dict[str, Any]]:
        """Properties by logical id."""
        return {
            logical_id: resource.get("Properties", {})
            for logical_id, resource in self.body["Resources"].items()
            if resource["Type"] == kind
        }


def synthesize(folder: Path, contexts: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.infra.synthesize", str(folder)],
        input=json.dumps(contexts),
        capture_output=True,
        check=False,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
    )


def read_templates(folder: Path, contexts: dict[str, Any]) -> list[Template]:
    return [
        Template(f"{name}/{path.name.partition('.')[0]}", json.loads(path.read_text()))
        for name in contexts
        for path in sorted((folder / name).glob("*.template.json"))
    ]


@pytest.fixture(scope="session")
def synthesized(tmp_path_factory):
    """The folder with a cloud assembly per context, written without credentials. cdk-nag found nothing, or this fails."""
    folder = tmp_path_factory.mktemp("cdk")
    done = synthesize(folder, {**CONTEXTS, **PLAIN, **CHANGED, **LARGE})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="session")
def templates(synthesized):
    """Both stacks of both contexts."""
    return read_templates(synthesized, CONTEXTS)
