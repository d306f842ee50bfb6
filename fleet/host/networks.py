"""A network of its own for each sandbox with the policy ``egress``: a bridge with a /28 from a pool."""

import asyncio
import ipaddress
import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.host.firewall import BRIDGE_PREFIX, Firewall, FirewallError, bridges, held, hold
from sandfleet.shared.errors import HostUnavailable, NoRoom, SandfleetError
from sandfleet.shared.fault_points import reach

logger = logging.getLogger(__name__)

_PREFIX_LENGTH = 28
_ATTEMPTS = 10
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class NetworkRefused(SandfleetError):
    """Networks for sandboxes cannot be had on this host; the message says why and what to do."""

    code = "network_refused"
    status = 503


class Networks:
    """Makes and removes the networks of one host's sandboxes. All carry the host's labels."""

    def __init__(self, engine: Engine, pool: ipaddress.IPv4Network, labels: dict[str, str]) -> None:
        self._engine = engine
        self._pool = pool
        self._labels = labels
        self._firewall = Firewall()
        self._choosing = asyncio.Lock()
        self._rules: int | None = None

    async def open(self, trial: str, labels: dict[str, str]) -> None:
        """Check that networks can be made here, and install the rules; makes and removes the network ``trial`` with these labels.

        Raises NetworkRefused, before anything was changed if the pool is in somebody's way.
        """
        if os.geteuid() != 0:
            raise NetworkRefused("it needs rules of the firewall, and this sandbox host does not run as root")
        if self._pool.prefixlen > _PREFIX_LENGTH:
            raise NetworkRefused(f"SANDFLEET_NETWORK_POOL {self._pool} is smaller than a /{_PREFIX_LENGTH}")
        try:
            await self._check_routes()
            self._rules = await hold()
            await self._firewall.ensure()
            await self.create(trial, labels)
            reach("networks.trial")
            await self.remove(trial)
        except NetworkRefused:
            raise
        except SandfleetError as error:
            raise NetworkRefused(error.message) from error

    def close(self) -> None:
        """Let go of the rules: from now on they may be uninstalled."""
        if self._rules is not None:
            os.close(self._rules)
            self._rules = None

    async def _check_routes(self) -> None:
        for network, via in await _routes():
            if network.overlaps(self._pool) and not via.startswith(BRIDGE_PREFIX):
                raise NetworkRefused(
                    f"the pool {self._pool} overlaps the route to {network} by {via}: set SANDFLEET_NETWORK_POOL to a "
                    "private range that is free"
                )

    async def create(self, name: str, labels: dict[str, str]) -> None:
        """Make the network ``name`` with the rules in force. Raises NoRoom when the pool is used up, or HostUnavailable."""
        try:
            async with held():
                if await self._firewall.ensure():
                    logger.warning("rules for networks of sandboxes were installed anew")
                # One at a time: two would choose among the same free ones, and the engine makes one after the other.
                async with self._choosing:
                    await self._create(name, {**self._labels, **labels})
        except (EngineError, FirewallError) as error:
            raise HostUnavailable(f"No network could be made for the sandbox: {error.message}") from error

    async def _create(self, name: str, labels: dict[str, str]) -> None:
        for left in reversed(range(_ATTEMPTS)):
            subnet = await self._free_subnet()
            bridge = f"{BRIDGE_PREFIX}{int(subnet.network_address):08x}"
            try:
                await self._engine.call(
                    "POST", "/networks/create", body=_description(name, subnet, bridge, labels)
                )
            except EngineError as error:
                with suppress(EngineError):
                    await self.remove(name)
                taken = "overlap" in error.message or "exist" in error.message
                if left and taken:  # by another host, since we looked
                    continue
                raise
            if bridge not in bridges():
                await self.remove(name)
                raise HostUnavailable(
                    "The Docker Engine works in another network namespace than this sandbox host (rootless, remote or in a "
                    "container), where the host's rules do not hold: run both in the same one."
                )
            return

    async def _free_subnet(self) -> ipaddress.IPv4Network:
        taken = [network for network, _ in await _routes()]
        for network in await self._engine.call("GET", "/networks"):
            for config in (network.get("IPAM") or {}).get("Config") or ():
                with suppress(ValueError):
                    taken.append(ipaddress.IPv4Network(config.get("Subnet", "")))
        subnets = list(self._pool.subnets(new_prefix=_PREFIX_LENGTH))
        free = _without(subnets, taken)
        if not free:
            raise NoRoom(
                f"All {len(subnets)} networks of this host's pool {self._pool} are in use; try again when a sandbox has "
                "ended, or enlarge SANDFLEET_NETWORK_POOL."
            )
        return random.choice(free)  # noqa: S311 - two hosts on a machine rarely choose the same one

    async def remove(self, name: str) -> None:
        """Remove a network; one that is gone is fine."""
        try:
            await self._engine.call("DELETE", f"/networks/{name}")
        except EngineError as error:
            if error.http_status != 404:
                raise

    async def sweep(
        self, alive: Callable[[], set[str]], ours: Callable[[dict[str, str]], bool] = lambda _: True
    ) -> None:
        """Repair the rules, and remove this host's networks that are none of ``alive``: names, asked for after looking.

        ``ours`` says by the labels of a network of the instance whether it is this host's.
        """
        try:
            if await self._firewall.ensure_again():
                logger.error("rules for networks of sandboxes were damaged, and are repaired")
        except FirewallError as error:
            logger.error("rules for networks of sandboxes cannot be checked", extra={"reason": error.message})
        labels = [f"{key}={value}" for key, value in self._labels.items()]
        found = await self._engine.call("GET", "/networks", params={"filters": json.dumps({"label": labels})})
        for name in {network["Name"] for network in found if ours(network["Labels"])} - alive():
            await self.remove(name)
            logger.info("removed a network that no sandbox owns")


def _description(
    name: str, subnet: ipaddress.IPv4Network, bridge: str, labels: dict[str, str]
) -> dict[str, Any]:
    return {
        "Name": name,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "EnableIPv6": False,
        "IPAM": {"Config": [{"Subnet": str(subnet)}]},
        "Options": {
            "com.docker.network.bridge.name": bridge,
            "com.docker.network.bridge.enable_icc": "false",
            "com.docker.network.bridge.enable_ip_masquerade": "true",
        },
        "Labels": labels,
    }


def _without(
    subnets: list[ipaddress.IPv4Network], taken: list[ipaddress.IPv4Network]
) -> list[ipaddress.IPv4Network]:
    return [subnet for subnet in subnets if not any(subnet.overlaps(network) for network in taken)]


async def _routes() -> list[tuple[ipaddress.IPv4Network, str]]:
    """Where this machine sends packets, of all its routing tables but for the way out, and by which interface."""
    ip = shutil.which("ip", path=_SEARCH_PATH)
    if ip is None:
        raise NetworkRefused("there is no program ip: install the package iproute2")
    process = await asyncio.create_subprocess_exec(
        ip, "-4", "-j", "route", "show", "table", "all", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    routes = []
    for route in json.loads(output or b"[]"):
        with suppress(ValueError):  # "default"
            network = ipaddress.IPv4Network(route["dst"])
            if network.prefixlen:
                routes.append((network, route.get("dev", route.get("type", "?"))))
    return routes
