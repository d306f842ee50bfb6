"""The few calls to a Docker Engine that the local stack makes itself: is it there, what carries a label, remove it."""

import json
import socket
import time
from typing import Any, NamedTuple, cast

import httpx

_TIMEOUT_S = 20.0


def _client(docker_host: str, timeout_s: float = _TIMEOUT_S) -> httpx.Client:
    if docker_host.startswith("unix://"):
        transport = httpx.HTTPTransport(uds=docker_host.removeprefix("unix://"))
        return httpx.Client(transport=transport, base_url="http://docker", timeout=timeout_s)
    return httpx.Client(base_url=docker_host.replace("tcp://", "http://", 1), timeout=timeout_s)


def version(docker_host: str, timeout_s: float = 5.0) -> str | None:
    """Version of the engine that answers at ``docker_host``, or None."""
    try:
        _knock(docker_host, timeout_s)
        with _client(docker_host, timeout_s) as client:
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
    with _client(docker_host) as client:
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
    with _client(docker_host) as client:
        containers, _ = _find(client, label)
    found = []
    for container in containers:
        name = container["Names"][0].lstrip("/") if container["Names"] else container["Id"][:12]
        _, of_a_run, run_id = name.partition("-run-")
        if of_a_run:  # else it waits for one
            found.append(SandboxContainer(name, run_id, time.time() - container["Created"]))
    return found


def bridges(docker_host: str) -> set[str]:
    """Names of the bridges that networks of the engine gave themselves."""
    with _client(docker_host) as client:
        networks = client.get("/networks").raise_for_status().json()
    option = "com.docker.network.bridge.name"
    return {n["Options"][option] for n in networks if option in (n.get("Options") or {})}


def remove_labelled(docker_host: str, label: str) -> list[str]:
    """Remove the containers and networks that carry a label; empty if the engine does not answer."""
    try:
        with _client(docker_host) as client:
            containers, networks = _find(client, label)
            for container in containers:
                client.delete(f"/containers/{container['Id']}", params={"force": "true", "v": "true"})
            for network in networks:
                client.delete(f"/networks/{network['Id']}")
    except (httpx.HTTPError, OSError):
        return []
    return [f"container {c['Id'][:12]}" for c in containers] + [f"network {n['Name']}" for n in networks]


def _find(client: httpx.Client, label: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    params = {"filters": json.dumps({"label": [label]})}
    containers = client.get("/containers/json", params={"all": "true", **params}).raise_for_status().json()
    networks = client.get("/networks", params=params).raise_for_status().json()
    return cast("list[dict[str, Any]]", containers), cast("list[dict[str, Any]]", networks)
