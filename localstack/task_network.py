"""The network of an emulator's tasks: a bridge of the Docker Engine, of one instance alone, from which its containers reach
this machine's servers.

MiniStack starts a task's container in the network of its own container. It has none here, so one is made that never
runs: its name is what MiniStack takes for its own.
"""

import sys
from dataclasses import dataclass

import httpx

from sandfleet.localstack.docker_api import emulator_name, engine_client
from sandfleet.localstack.leftovers import LABEL
from sandfleet.localstack.process import LocalStackError, Process, tcp_answers
from sandfleet.localstack.supervisor import Supervisor


@dataclass(frozen=True)
class TaskNetwork:
    """``name`` of the network and of the container in it; ``address`` of this machine in it, and its ``range``."""

    name: str
    address: str
    range: str


def make_task_network(docker_host: str, instance: str, image: str) -> TaskNetwork:
    """Make the network and the container, of any ``image`` that the engine has. Both carry the instance's label.

    Raises `LocalStackError` if the engine refuses.
    """
    name = emulator_name(instance)
    labels = {LABEL: instance}
    try:
        with engine_client(docker_host) as client:
            network = {"Name": name, "CheckDuplicate": True, "Driver": "bridge", "Labels": labels}
            client.post("/networks/create", json=network).raise_for_status()
            config = client.get(f"/networks/{name}").raise_for_status().json()["IPAM"]["Config"][0]
            container = {"Image": image, "Labels": labels, "HostConfig": {"NetworkMode": name}}
            client.post("/containers/create", params={"name": name}, json=container).raise_for_status()
    except httpx.HTTPStatusError as error:
        raise LocalStackError(
            f"The Docker Engine made no network for tasks: {error.response.text.strip()}"
        ) from None
    return TaskNetwork(name, config["Gateway"], config["Subnet"])


def remove_task_network(docker_host: str, network: TaskNetwork) -> None:
    """Remove the network and the container in it; the network stays while it has others."""
    with engine_client(docker_host) as client:
        client.delete(f"/containers/{network.name}", params={"force": "true", "v": "true"})
        client.delete(f"/networks/{network.name}")


async def start_forwarder(
    supervisor: Supervisor, network: TaskNetwork, *ports: int, name: str = "forwarder"
) -> None:
    """Let the network's containers reach these ports of 127.0.0.1, at the network's address."""

    async def ready() -> bool:
        return all([await tcp_answers(port, network.address) for port in ports])

    await supervisor.start(
        Process(
            name=name,
            argv=[
                *(sys.executable, "-P", "-m", "sandfleet.localstack.forwarder"),
                *(network.address, network.range),
                *map(str, ports),
            ],
            env=supervisor.base_env(),
            cwd=supervisor.root,
            log=supervisor.logs / f"{name}.log",
            ready=ready,
        )
    )
