"""A network namespace that plays the internet: a public address, name server, web server, and a cloud's metadata."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

# A public range that is far away; nothing leaves the machine, since its route ends in the namespace.
ADDRESS, HOST_ADDRESS, PREFIX = "11.22.33.10", "11.22.33.9", 29
METADATA = "169.254.169.254"
BANNER = b"this is the internet\n"
_LOCK = Path(
    "/run/lock/sandfleet-test-internet"
)  # of the addresses, when several test sessions share the machine
_SERVER = Path(__file__).with_name("internet_server.py")


@dataclass(frozen=True)
class Internet:
    """Its servers listen on every address of the namespace: ``port`` greets, 80 and 443 do as well, 53 names."""

    namespace: str
    interface: str
    port: int

    def asked_names(self) -> list[str]:
        """Names that its name server was asked for, in order."""
        answer = self.run(sys.executable, str(_SERVER), "asked")
        names: list[str] = json.loads(answer)
        return names

    def run(self, *command: str) -> str:
        """What a program in the namespace prints."""
        return ip("netns", "exec", self.namespace, *command)


def ip(*arguments: str) -> str:
    """Run ``ip``; its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@asynccontextmanager
async def internet() -> AsyncIterator[Internet]:
    """Make the namespace, start its servers, and remove both."""
    name = f"sfti{os.getpid():x}-{uuid.uuid4().hex[:3]}"  # an interface has it, too, of 15 characters at most
    with _alone(), _namespace(name):
        server = await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", name, sys.executable, str(_SERVER), "serve", stdout=asyncio.subprocess.PIPE
        )
        assert server.stdout is not None
        try:
            port = int(await server.stdout.readline())
            yield Internet(name, name, port)
        finally:
            server.terminate()
            await server.wait()


@contextmanager
def _alone() -> Iterator[None]:
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in Path("/run/netns").glob("sfti*-*"):  # by a session that was killed: no other has the lock
            ip("netns", "del", left.name)
        yield


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "outside", "netns", name)
        ip("addr", "add", f"{HOST_ADDRESS}/{PREFIX}", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{ADDRESS}/{PREFIX}", "dev", "outside")
        ip("-n", name, "link", "set", "outside", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "addr", "add", f"{METADATA}/32", "dev", "lo")
        ip("-n", name, "route", "add", "default", "via", HOST_ADDRESS)
        ip("route", "add", f"{METADATA}/32", "via", ADDRESS, "dev", name)
        yield
    finally:
        ip("netns", "del", name)  # and both ends of the cable
