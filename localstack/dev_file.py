"""``dev.json``: how other programs find a running local stack."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sandfleet.localstack.process import LocalStackError


@dataclass(frozen=True)
class StackInfo:
    """Addresses, the API key and the process ids by name of a running stack."""

    api_url: str
    api_key: str
    database_url: str
    redis_url: str
    aws_endpoint_url: str
    queue_urls: dict[str, str]
    provider_url: str
    host_socket: str
    instance: str
    sandbox: str
    docker_host: str | None = None
    snapshot_bucket: str = ""
    api_urls: list[str] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)
    metrics_urls: dict[str, str] = field(default_factory=dict)


def write(path: Path, info: StackInfo) -> None:
    """Write the file in one step, readable for this user only: it holds the key."""
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(info), file, indent=2)
    draft.replace(path)


def read(path: Path) -> StackInfo:
    """The stack that the file tells of; raises `LocalStackError` if there is none."""
    try:
        return StackInfo(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise LocalStackError(
            f"No stack runs here ({path} is missing). Start one with `sandfleet dev`, or set SANDFLEET_API_URL and "
            "SANDFLEET_API_KEY."
        ) from None
    except (ValueError, TypeError) as error:
        raise LocalStackError(
            f"{path} cannot be read ({error}). Stop the stack and start it again."
        ) from None
