"""Sandboxes of many callers while hosts are killed, frozen and drained and containers die: no file changes without a word."""

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from sandfleet.fleet.host import labels
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.sandbox_client import ApiError, Sandbox, SandboxApi, SandboxLost
from tests.fixtures_servers import TestServers
from tests.sandbox.conftest import check_empty
from tests.sandbox.host_process import Host
from tests.sandboxes.conftest import Fleet, open_fleet

_CALLERS, _STEPS = 8, 40
_DEADLINE_S = 600.0
_AGAIN_S = 0.2
_SOON = {429, 502, 503}  # statuses with which a caller is asked to come again, or told that something broke
_LOOK = "import json,os;print(json.dumps({n:open(n).read() for n in os.listdir('.')}))"

Files = dict[str, str]


@pytest.fixture
async def fleet(servers: TestServers, engine: str) -> AsyncIterator[Fleet]:
    """For one test: it harms the host."""
    async with open_fleet(servers, engine) as opened:
        yield opened


@dataclass
class Caller:
    """One who works in one sandbox, and knows what must be in it.

    A request that broke off may have been done or not, so several states are possible until the next look.
    """

    api: SandboxApi
    chance: random.Random
    sandbox: Sandbox
    possible: list[Files] = field(default_factory=lambda: [{}])
    ever: list[Files] = field(default_factory=lambda: [{}])
    kept: dict[str, list[Files]] = field(default_factory=dict)  # by snapshot
    asked: set[str] = field(default_factory=set)  # of these, those that the caller wanted
    latest: str | None = None
    restoring: str | None = None
    losses: int = 0

    async def work(self) -> None:
        """Take some steps, and look at all files after each that may have changed them."""
        steps = [self.write, self.write, self.append, self.remove, self.keep, self.restore, self.fork]
        for _ in range(_STEPS):
            step = self.chance.choice(steps)
            await self._told(step)
            await self.look()

    async def _told(self, step: Callable[[], Awaitable[None]]) -> bool:
        """Whether the step was done; a loss is taken note of."""
        try:
            await step()
        except SandboxLost as lost:
            self._lost(lost)
        except ApiError as error:
            if error.status not in _SOON and error.code not in ("conflict", "snapshot_failed"):
                raise
            await asyncio.sleep(_AGAIN_S)
        else:
            return True
        return False

    def _lost(self, lost: SandboxLost) -> None:
        self.losses += 1
        known = self.latest if self.restoring is None else self.restoring
        if lost.restored is None:
            assert known is None, f"the snapshot {known} was there, and it began empty: {lost}"
            self.possible = [{}]
        elif lost.restored in self.kept:
            assert lost.restored in (self.latest, self.restoring), f"it began with an older snapshot: {lost}"
            self.possible = self.kept[lost.restored]
        else:  # a host kept it as it drained, or the caller did and was not told
            self.possible = list(self.ever)
            self.kept[lost.restored] = self.possible
            self.latest = lost.restored
        self.restoring = None

    async def look(self) -> None:
        """What is there is what must be."""
        found: list[Files] = []

        async def read() -> None:
            result = await self.sandbox.exec(["python3", "-c", _LOOK], cwd="/workspace")
            assert result.exit_code == 0, result
            found.append(json.loads(result.stdout))

        while not found:
            await self._told(read)
        assert found[0] in self.possible, (found[0], self.possible)
        self.restoring = None  # one that broke off would have been told by now
        self.possible = [found[0]]
        self.ever.append(found[0])

    async def _change(self, change: Callable[[Files], Files], request: Awaitable[None]) -> None:
        before = self.possible
        changed = [change(dict(each)) for each in before]
        self.possible = [*before, *changed]
        self.ever.extend(changed)
        await request
        self.possible = changed

    async def write(self) -> None:
        name, text = self._name(), self.chance.randbytes(8).hex()
        await self._change(lambda files: {**files, name: text}, self.sandbox.write_file(name, text.encode()))

    async def append(self) -> None:
        name, text = self._name(), self.chance.randbytes(2).hex()
        await self._change(
            lambda files: {**files, name: files.get(name, "") + text},
            self.sandbox.write_file(name, text.encode(), append=True),
        )

    async def remove(self) -> None:
        (files,) = self.possible
        if files:
            name = self.chance.choice(sorted(files))
            await self._change(
                lambda files: {each: text for each, text in files.items() if each != name},
                self.sandbox.remove(name),
            )

    async def keep(self) -> None:
        found = await self.sandbox.snapshot()
        self.latest = found["snapshot_id"]
        self.kept[self.latest] = list(self.possible)
        self.asked.add(self.latest)

    async def restore(self) -> None:
        if self.kept:
            wanted = self.restoring = self.chance.choice(sorted(self.kept))
            try:
                await self.sandbox.restore(wanted)
            except ApiError as error:
                if error.status != 404 or wanted in self.asked:
                    raise
                del self.kept[wanted]  # of what drains keep the latest replaces the others
                self.restoring = None
                return
            self.possible, self.latest, self.restoring = self.kept[wanted], wanted, None

    async def fork(self) -> None:
        fork = await self.sandbox.fork()
        other = Caller(
            self.api, self.chance, fork, list(self.possible), list(self.ever), latest="whatever it began with"
        )
        await other.look()
        await fork.delete()

    def _name(self) -> str:
        return self.chance.choice("abc")


async def _harm(hosts: list[Host], chance: random.Random, enough: asyncio.Event) -> None:
    """Faults until it is enough; at most one host is away at a time."""
    async with Engine(hosts[0].docker_host) as engine:
        while not enough.is_set():
            host = chance.choice(hosts)
            fault = chance.choice(["kill", "kill", "stop", "freeze", "container", "container"])
            if fault == "kill":
                await host.kill()
                await host.start()
            elif fault == "stop":
                assert await host.stop() == 0
                await host.start()
            elif fault == "freeze":
                assert host.process is not None
                host.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(0.5, 4.0))
                host.process.send_signal(signal.SIGCONT)
            elif found := await engine.containers(f"{labels.INSTANCE}={host.instance}"):
                with contextlib.suppress(EngineError):  # it ended meanwhile
                    await engine.call("POST", f"/containers/{chance.choice(found)['Id']}/kill")
            await asyncio.sleep(chance.uniform(0.2, 1.0))


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
async def test_files_change_by_what_their_owner_did_or_was_told(fleet: Fleet, seed: int) -> None:
    """Whatever is in a sandbox is what its caller has put there since the snapshot that it was told of.

    Breaks when a loss is not told, when one begins with an older snapshot than the latest, and when a write that was answered
    is not there.
    """
    chance = random.Random(seed)
    env = {
        **fleet.host.env,
        "SANDFLEET_HOST_LISTEN": "127.0.0.1:0",
        "SANDFLEET_HOST_ID": f"elsewhere-{fleet.host.instance}",
    }
    folder, database, engine = fleet.host.folder / "other", fleet.host.database_url, fleet.host.docker_host
    other = Host(folder, database, "docker", engine, env, secret=fleet.host.secret)
    await other.start()
    try:
        await _work_under_faults(fleet, [fleet.host, other], chance)
        await check_empty(other)
    finally:
        assert await other.stop() == 0


async def _work_under_faults(fleet: Fleet, hosts: list[Host], chance: random.Random) -> None:
    async with SandboxApi(fleet.url, fleet.alice) as api:
        callers = [
            Caller(api, random.Random(chance.random()), await api.create(ttl_s=600)) for _ in range(_CALLERS)
        ]
        enough = asyncio.Event()
        working = asyncio.gather(*(caller.work() for caller in callers))
        harming = asyncio.create_task(_harm(hosts, chance, enough))
        try:
            await asyncio.wait([working, harming], timeout=_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            assert working.done() or harming.done(), "callers wait for something"
        finally:
            enough.set()
            await asyncio.wait([harming])
            working.cancel()
            await asyncio.wait([working])
        harming.result()
        working.result()
        for caller in callers:
            await caller.look()
            await caller.sandbox.delete()
        assert sum(caller.losses for caller in callers) > 0
