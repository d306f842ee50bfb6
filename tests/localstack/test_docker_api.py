"""Asking for an engine that is not there, or not yet."""

import gc
import socket
import sys
from pathlib import Path

import pytest

from sandfleet.localstack import docker_api


def test_asking_a_socket_that_nobody_serves_leaves_no_socket_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red without the knock: the HTTP client leaves a refused unix socket to the garbage collector, which complains."""
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: complaints.append(found.exc_value))
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    assert docker_api.version(f"unix://{path}") is None
    assert docker_api.version(f"unix://{tmp_path / 'missing.sock'}") is None
    gc.collect()
    assert complaints == []
