"""The compose file is for this machine, always gives the same servers, and has them where its first lines say."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

FILE = Path(__file__).parents[2] / "docker-compose.yml"


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return found


def test_images_are_pinned(services: dict[str, Any]) -> None:
    """Red for `latest`, or for a version that moves with each release."""
    for name, service in services.items():
        assert re.fullmatch(r"[a-z/]+:[0-9]+\.[0-9]+(\.[0-9]+)?", service["image"]), name


def test_servers_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    """Red for a port that the whole network could reach: the password is in the file."""
    for name, service in services.items():
        assert [port for port in service["ports"] if not port.startswith("127.0.0.1:")] == [], name


def test_its_first_lines_say_how_to_reach_it(services: dict[str, Any]) -> None:
    """Red when a port, the password or the database is changed in one place only."""
    told = dict(re.findall(r"^#\s+([A-Z_]+_URL)=(\S+)", FILE.read_text(), re.MULTILINE))
    assert set(told) == {"DATABASE_URL", "REDIS_URL", "AWS_ENDPOINT_URL"}
    ports = {port.split(":")[1] for service in services.values() for port in service["ports"]}
    assert {str(urlsplit(url).port) for url in told.values()} == ports
    database, postgres = urlsplit(told["DATABASE_URL"]), services["postgres"]["environment"]
    assert (database.username, database.password, database.path.lstrip("/")) == (
        postgres["POSTGRES_USER"],
        postgres["POSTGRES_PASSWORD"],
        postgres["POSTGRES_DB"],
    )
