"""The few calls to a Docker Engine that the local stack makes itself: is it there, what carries a label, remove it."""

import json
import socket
import time
from typing import Any, NamedTuple, cast

import httpx

_TIMEOUT_S = 20.0
_TRIES = 5
EMULATOR_LABEL = "ministack.instance"
"""The emulator's label of its tasks' containers: NAME:PORT, where we give the name."""


def emulator_name(instance: str) -> str:
    """The name of an instance's emulator in `EMULATOR_LABEL`."""
    return f"sandfleet-{instance}"


def engine_client(docker_host: str, timeout_s: float = _TIMEOUT_S) -> httpx.Client:
    """A client of the engine's API."""
    if docker_host.startswith("unix://"):
        transport = httpx.HTTPTransport(uds=docker_host.removeprefix("unix://"))
        return httpx.Client(transport=transport, base_url="http://docker", timeout=timeout_s)
    return httpx.Client(base_url=docker_host.replace("tcp://", "http://", 1), timeout=timeout_s)


def version(docker_host: str, timeout_s: float = 5.0) -> str | None:
    """Version of the engine that answers at ``docker_host``, or None."""
    try:
        _knock(docker_host, timeout_s)
        with engine_client(docker_host, timeout_s) as client:
            return str(client.get("/version").raise_for_status().json()["Version"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, OSError):
        return None


def _knock(docker_host: str, timeout_s: float) -> None:
    """Raise OSError if nobody listens. httpcore does not close a unix socket whose connection was refused, as it is again
    and again while an engine starts."""
    if docker_host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as knocking:
            knocking.settimeout(timeout_s)
            knocking.connect(docker_host.removeprefix("unix://"))


def labelled(docker_host: str, label: str) -> list[str]:
    """Containers and networks that carry a label (``key=value``), as ``container NAME`` and ``network NAME``."""
    with engine_client(docker_host) as client:
        containers, networks = _find(client, label)
    return [f"container {c['Names'][0].lstrip('/') if c['Names'] else c['Id'][:12]}" for c in containers] + [
        f"network {n['Name']}" for n in networks
    ]


class SandboxContainer(NamedTuple):
    """A sandbox's container: its name, the run that it says, and its age by this machine's clock."""

    name: str
    run_id: str
    age_s: float


def sandbox_containers(docker_host: str, label: str) -> list[SandboxContainer]:
    """The containers of runs that carry a label (``key=value``). Raises httpx.HTTPError if no engine answers."""
    with engine_client(docker_host) as client:
        containers, _ = _find(client, label)
    found = []
    for container in containers:
        name = container["Names"][0].lstrip("/") if container["Names"] else container["Id"][:12]
        _, of_a_run, run_id = name.partition("-run-")
        if of_a_run:  # else it waits for one
            found.append(SandboxContainer(name, run_id, time.time() - container["Created"]))
    return found


def tasks(docker_host: str, instance: str, name: str | None = None) -> set[str]:
    """Names of the containers that run of the tasks of an instance's emulator; those that their definition calls ``name``, or
    all. Raises httpx.HTTPError if no engine answers."""
    with engine_client(docker_host) as client:
        found = _tasks(client, instance)
    part = "com.amazonaws.ecs.container-name"
    return {
        container["Names"][0].lstrip("/")
        for container in found
        if container["State"] == "running" and name in (None, container["Labels"].get(part))
    }


def remove_ended_tasks(docker_host: str, instance: str) -> None:
    """Remove the containers of tasks of an instance's emulator that have ended: it keeps them for minutes."""
    with engine_client(docker_host) as client:
        for container in _tasks(client, instance):
            if container["State"] != "running":
                client.delete(f"/containers/{container['Id']}", params={"force": "true", "v": "true"})


def bridges(docker_host: str) -> set[str]:
    """Names of the bridges that networks of the engine gave themselves."""
    with engine_client(docker_host) as client:
        networks = client.get("/networks").raise_for_status().json()
    option = "com.docker.network.bridge.name"
    return {n["Options"][option] for n in networks if option in (n.get("Options") or {})}


def remove_labelled(docker_host: str, label: str) -> list[str]:
    """Remove the containers and networks that carry a label, and the tasks of its instance's emulator; empty if the engine
    does not answer."""
    removed: dict[str, None] = {}
    try:
        with engine_client(docker_host) as client:
            for _ in range(_TRIES):  # an emulator that still runs replaces its tasks
                containers, networks = _find(client, label)
                if not containers and not networks:
                    break
                for container in containers:
                    client.delete(f"/containers/{container['Id']}", params={"force": "true", "v": "true"})
                    removed[f"container {container['Id'][:12]}"] = None
                for network in networks:
                    client.delete(f"/networks/{network['Id']}")
                    removed[f"network {network['Name']}"] = None
    except (httpx.HTTPError, OSError):
        return []
    return list(removed)


def _find(client: httpx.Client, label: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    params = {"filters": json.dumps({"label": [label]})}
    containers = client.get("/containers/json", params={"all": "true", **params}).raise_for_status().json()
    networks = client.get("/networks", params=params).raise_for_status().json()
    containers += _tasks(client, label.partition("=")[2])
    return cast("list[dict[str, Any]]", containers), cast("list[dict[str, Any]]", networks)


def _tasks(client: httpx.Client, instance: str) -> list[dict[str, Any]]:
    params = {"all": "true", "filters": json.dumps({"label": [EMULATOR_LABEL]})}
    containers = client.get("/containers/json", params=params).raise_for_status().json()
    name = emulator_name(instance)
    return [c for c in containers if c["Labels"][EMULATOR_LABEL].rpartition(":")[0] == name]
