"""Asking for an engine that is not there, or not yet; and removing what an instance has in one."""

import gc
import socket
import sys
import uuid
from pathlib import Path

import pytest

from sandfleet.localstack import docker_api
from sandfleet.localstack.leftovers import LABEL
from tests.fixtures_engine import IMAGE


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


def test_the_tasks_of_an_instances_emulator_go_with_it(engine: str) -> None:
    """And those of another's stay. Red when they are found by our own label alone, which an emulator knows nothing of."""
    mine, other = f"test{uuid.uuid4().hex[:8]}", f"test{uuid.uuid4().hex[:8]}"
    with docker_api.engine_client(engine) as client:
        for instance in (mine, other):
            labels = {docker_api.EMULATOR_LABEL: f"{docker_api.emulator_name(instance)}:4566"}
            body = {"Image": IMAGE, "Labels": labels, "Cmd": ["sleep", "600"]}
            body["HostConfig"] = {"NetworkMode": "none"}
            name = f"{instance}-task"
            client.post("/containers/create", params={"name": name}, json=body).raise_for_status()
            client.post(f"/containers/{name}/start").raise_for_status()
    assert docker_api.tasks(engine, mine) == {f"{mine}-task"}
    assert len(docker_api.remove_labelled(engine, f"{LABEL}={mine}")) == 1
    assert docker_api.tasks(engine, mine) == set()
    assert docker_api.tasks(engine, other) == {f"{other}-task"}
    docker_api.remove_labelled(engine, f"{LABEL}={other}")
