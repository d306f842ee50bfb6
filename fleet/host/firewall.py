"""The machine's rules for sandboxes with a network: a table of nftables of its own, which no other program touches.

What one table drops no other can accept, so the rules hold whatever Docker, firewalld or an administrator do in theirs.
They name no address of this machine and no pool, only the prefix of the bridges: one copy serves all hosts of a machine.
"""

import asyncio
import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sandfleet.fleet.host.closed_ranges import CLOSED_IPV4
from sandfleet.shared.errors import SandfleetError

BRIDGE_PREFIX = "sfleet"
"""All bridges of sandboxes, and no other interface, begin with this."""

_TABLE = "sandfleet"
# Of one sandbox: connections that it may hold open, and new ones a second. Each takes a place in a table of the
# kernel's that the whole machine shares, 65,536 or more of them.
_CONNECTIONS = 256
_NEW_PER_S = 100
_INTERFACES = Path("/sys/class/net")
_NAMESPACE = "/proc/self/ns/net"
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_TIMEOUT_S = 30.0

RULES = f"""
table inet {_TABLE} {{
    set connections {{ type ipv4_addr; size 65535; flags dynamic; }}
    set starts {{ type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1m; }}
    chain from_sandboxes {{
        type filter hook prerouting priority raw; policy accept;
        iifname != "{BRIDGE_PREFIX}*" accept
        meta nfproto != ipv4 drop
        fib daddr type != unicast drop
        fib saddr . iif oif missing drop
        ip daddr {{ {", ".join(CLOSED_IPV4)} }} drop
        ip protocol != {{ icmp, tcp, udp }} drop
    }}
    chain forwarded {{
        type filter hook forward priority filter - 10; policy accept;
        oifname "{BRIDGE_PREFIX}*" ct state != {{ established, related }} drop
        iifname != "{BRIDGE_PREFIX}*" accept
        ct state invalid drop
        ct state new add @starts {{ ip saddr limit rate over {_NEW_PER_S}/second burst {2 * _NEW_PER_S} packets }} drop
        ct state new add @connections {{ ip saddr ct count over {_CONNECTIONS} }} drop
    }}
}}
"""
"""The first chain sees what sandboxes send before Docker translates addresses: ``local`` is any address of the machine,
and is no ``unicast`` to the routing table. The second lets in only answers."""

_REPLACE = f"add table inet {_TABLE}\ndelete table inet {_TABLE}\n{RULES}"  # in one step: there is no gap


class FirewallError(SandfleetError):
    """The rules cannot be installed or removed here; the message says what to do."""

    code = "firewall"
    status = 503


class Firewall:
    """The table, as this process last saw it whole."""

    def __init__(self) -> None:
        self._whole: Any = None

    async def ensure(self) -> bool:
        """Install the rules unless they are as this process installed them. True if they were not.

        Raises FirewallError when that cannot be done.
        """
        if os.geteuid() != 0:
            raise FirewallError("Rules for networks need root.")
        if self._whole is not None and await _content() == self._whole:
            return False
        await _nft("-f", "-", stdin=_REPLACE)
        self._whole = await _content()
        return True

    async def ensure_again(self) -> bool:
        """As `ensure`, if it has done so before: True if the rules were damaged meanwhile."""
        return self._whole is not None and await self.ensure()


async def installed() -> bool:
    """Whether the table is there. Raises FirewallError if that cannot be seen."""
    return _nft_path() is not None and await _content() is not None


def bridges() -> list[str]:
    """Bridges of sandboxes that this machine has now, in this network namespace."""
    return sorted(path.name for path in _INTERFACES.glob(f"{BRIDGE_PREFIX}*") if (path / "bridge").is_dir())


@asynccontextmanager
async def held() -> AsyncIterator[None]:
    """While this lasts nobody uninstalls the rules."""
    namespace = await hold()
    try:
        yield
    finally:
        os.close(namespace)


async def hold() -> int:
    """A descriptor of the rules: nobody uninstalls them before it is closed, or its process has ended."""
    # The namespace itself is the lock: it is what the rules belong to, and nothing is left behind.
    namespace = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        await asyncio.to_thread(fcntl.flock, namespace, fcntl.LOCK_SH)
    except BaseException:
        os.close(namespace)
        raise
    return namespace


async def uninstall() -> bool:
    """Remove the rules; False if there were none. Raises FirewallError while somebody uses them: sandboxes with a network
    are there, or a host that makes them."""
    namespace = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        alone = _locked(namespace)
        if left := bridges():
            raise FirewallError(
                f"{len(left)} networks of sandboxes are up ({left[0]}, …): stop the sandbox hosts first."
            )
        if not alone:
            raise FirewallError("A sandbox host that runs here has templates with networks: stop it first.")
        if not await installed():
            return False
        await _nft("-f", "-", stdin=f"delete table inet {_TABLE}\n")
        return True
    finally:
        os.close(namespace)


async def unused() -> bool:
    """Whether the rules are there and nobody uses them: hosts that were killed have left them."""
    if os.geteuid() != 0 or bridges() or not await installed():
        return False
    namespace = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _locked(namespace)
    finally:
        os.close(namespace)


def _locked(namespace: int) -> bool:
    """Whether nobody else uses the rules, and until the descriptor is closed nobody begins to."""
    try:
        fcntl.flock(namespace, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _content() -> Any:
    """The table without what changes by itself (handles, elements of sets); None if there is none."""
    if not await _is_there():
        return None
    try:
        listed = json.loads(await _nft("-j", "list", "table", "inet", _TABLE))["nftables"]
    except FirewallError:
        if await _is_there():
            raise
        return None  # another process has removed it meanwhile
    parts = [(kind, dict(value)) for part in listed for kind, value in part.items() if kind != "metainfo"]
    for kind, value in parts:
        value.pop("handle", None)
        if kind == "set":
            value.pop("elem", None)
    return parts


async def _is_there() -> bool:
    tables = json.loads(await _nft("-j", "list", "tables"))["nftables"]
    ours = ("inet", _TABLE)
    return any((part["table"]["family"], part["table"]["name"]) == ours for part in tables if "table" in part)


def _nft_path() -> str | None:
    return shutil.which("nft", path=_SEARCH_PATH)


async def _nft(*arguments: str, stdin: str = "") -> bytes:
    nft = _nft_path()
    if nft is None:
        raise FirewallError("There is no program nft: install the package nftables.")
    process = await asyncio.create_subprocess_exec(
        nft,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, complaint = await process.communicate(stdin.encode())
    except TimeoutError:
        raise FirewallError("nft does not end.") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        said = complaint.decode(errors="replace").strip()[:500]
        raise FirewallError(
            f"nftables refused: {said}. The kernel needs nf_tables, and this process NET_ADMIN."
        )
    return output
