"""The fleet as AWS runs it: ECS services and Auto Scaling groups, and how many tasks and hosts they are asked for."""

from collections.abc import Iterable, Mapping, Set
from contextlib import AsyncExitStack
from typing import Any

from sandfleet.shared.errors import ScalingFailed
from sandfleet.shared.scaling.settings import Target
from sandfleet.shared.settings import Settings

_PROTECTED_AT_ONCE = 50  # instances in one call


class Clients:
    """Clients of AWS, or of the emulator, opened at first use: making one takes long."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self._opened: dict[str, Any] = {}

    async def of(self, service: str) -> Any:
        """The client of a service of AWS."""
        if service not in self._opened:
            from aiobotocore.config import AioConfig
            from aiobotocore.session import get_session

            endpoint = self._settings.aws_endpoint_url
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"} if endpoint else {}
            self._opened[service] = await self._stack.enter_async_context(
                get_session().create_client(
                    service,
                    region_name=self._settings.aws_region,
                    endpoint_url=endpoint,
                    config=AioConfig(connect_timeout=2, read_timeout=5, retries={"max_attempts": 2}),
                    **keys,
                )
            )
        return self._opened[service]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._stack.aclose()


class Service:
    """An ECS service. Its tasks protect themselves while they execute runs, so that ECS takes idle ones."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._cluster, self._name = name.split("/")

    async def desired(self) -> int:
        """The count that the service was asked for. Raises ScalingFailed if there is no such service."""
        return int((await self._describe())["desiredCount"])

    async def newest_tasks(self) -> Set[str] | None:
        """Ids of the tasks that replace those of older deployments; None: there is one deployment."""
        deployments = (await self._describe()).get("deployments", ())
        if len(deployments) < 2:
            return None
        newest = next(d["id"] for d in deployments if d["status"] == "PRIMARY")
        tasks: set[str] = set()
        # Started by a service, a task has the deployment's id there; no other filter may stand beside it.
        pages = self._client.get_paginator("list_tasks").paginate(cluster=self._cluster, startedBy=newest)
        async for page in pages:
            tasks |= {arn.rpartition("/")[2] for arn in page["taskArns"]}
        return tasks

    async def _describe(self) -> dict[str, Any]:
        try:
            answer = await self._client.describe_services(cluster=self._cluster, services=[self._name])
        except self._client.exceptions.ClusterNotFoundException:
            answer = {}
        for service in answer.get("services", ()):
            if service["status"] == "ACTIVE":
                return dict(service)
        raise ScalingFailed(
            f"There is no ECS service {self._cluster}/{self._name}: see SANDFLEET_SCALER_TARGETS."
        )

    async def ask_for(self, count: int) -> None:
        """Ask for ``count`` tasks."""
        await self._client.update_service(cluster=self._cluster, service=self._name, desiredCount=count)


class Group:
    """An Auto Scaling group of hosts, whose host ids are their instances'."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    async def desired(self) -> int:
        """The capacity that the group was asked for. Raises ScalingFailed if there is no such group."""
        return int((await self._describe())["DesiredCapacity"])

    async def newest_tasks(self) -> Set[str] | None:
        """None: a group has no deployments."""
        return None

    async def protect(self, busy: Set[str]) -> None:
        """Keep the ``busy`` hosts from being taken when the group scales in, whoever asks for it, and give the others free."""
        instances = (await self._describe())["Instances"]
        for protect in (True, False):
            turned = to_turn(instances, busy, protect=protect)
            for start in range(0, len(turned), _PROTECTED_AT_ONCE):
                await self._client.set_instance_protection(
                    AutoScalingGroupName=self._name,
                    InstanceIds=turned[start : start + _PROTECTED_AT_ONCE],
                    ProtectedFromScaleIn=protect,
                )

    async def ask_for(self, count: int) -> None:
        """Ask for ``count`` hosts."""
        await self._client.set_desired_capacity(
            AutoScalingGroupName=self._name, DesiredCapacity=count, HonorCooldown=False
        )

    async def _describe(self) -> dict[str, Any]:
        answer = await self._client.describe_auto_scaling_groups(AutoScalingGroupNames=[self._name])
        for group in answer["AutoScalingGroups"]:
            return dict(group)
        raise ScalingFailed(f"There is no Auto Scaling group {self._name}: see SANDFLEET_SCALER_TARGETS.")


def to_turn(instances: Iterable[Mapping[str, Any]], busy: Set[str], *, protect: bool) -> list[str]:
    """Ids of the instances of a group that are to be protected, or no longer; of those in service, since AWS refuses a
    call that names another one, and with it all that it names."""
    return [
        instance["InstanceId"]
        for instance in instances
        if instance["LifecycleState"] == "InService"
        and (instance["InstanceId"] in busy) is protect
        and bool(instance.get("ProtectedFromScaleIn")) is not protect
    ]


async def open_target(clients: Clients, target: Target) -> Service | Group:
    """What a target names."""
    if target.service:
        return Service(await clients.of("ecs"), target.service)
    return Group(await clients.of("autoscaling"), target.group)
