"""Between the moments in which a sandbox is somebody's: while it is made, taken over, or found again."""

import uuid
from contextlib import asynccontextmanager

import pytest

from sandfleet.fleet.host.agent_files import AgentFiles
from sandfleet.fleet.host.bwrap_backend import BwrapBackend
from sandfleet.fleet.host.capacity import Capacity
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.sandbox import Sandbox
from sandfleet.fleet.host.snapshots import Snapshots
from sandfleet.fleet.host.state import Kept, StateFolder
from sandfleet.fleet.host.warm import Refill
from sandfleet.fleet.sandbox.errors import HostUnavailable, SandboxLost, StaleAttempt
from sandfleet.shared.ids import Fence, RunKey
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import read_templates
from tests.waiting import eventually

FENCE = Fence(RunKey("acme", "ada", uuid.uuid4()), 1)
pytestmark = pytest.mark.usefixtures("nothing_to_begin_with")
SPEC = {"shell": "echo here", "timeout_s": 60, "output_bytes": 100}


@asynccontextmanager
async def registry_in(folder):
    """A registry in this process, with bwrap, and its backend."""
    folder.chmod(0o755)
    sandboxes = folder / "sandboxes"
    sandboxes.mkdir(mode=0o755)
    config, templates = Settings(), read_templates(Settings())
    backend = BwrapBackend(templates)
    made = Registry(
        backend,
        sandboxes,
        AgentFiles(folder / "agent"),
        templates,
        state=StateFolder(folder / "state"),
        capacity=Capacity.of_host(config),
        snapshots=Snapshots(config, folder / "snapshots", "here"),
        refill=Refill(1.0, 600.0),
    )
    try:
        yield made, backend
    finally:
        await made.close()
        await backend.close()


async def said(sandbox, fence):
    return [data async for event, data in sandbox.exec(fence, SPEC, None) if event == "stdout"]


async def test_a_sandbox_that_ends_before_it_is_handed_over_is_not_handed_over(tmp_path, monkeypatch):
    """Red when the one who makes it does not look again: it would stay among the living, and every call fail, until its
    lifetime is over."""
    find = Snapshots.find
    async with registry_in(tmp_path) as (registry, backend):

        async def ends_meanwhile(snapshots, key):
            (sandbox_id,) = registry.owned()
            await backend.kill(sandbox_id)
            await eventually(lambda: not registry._background, what="who serves it has seen its end")
            return await find(snapshots, key)

        monkeypatch.setattr(Snapshots, "find", ends_meanwhile)
        with pytest.raises(HostUnavailable):
            await registry.acquire(FENCE)
        monkeypatch.setattr(Snapshots, "find", find)
        acquired = await registry.acquire(FENCE)
        assert acquired.created
        assert await said(acquired.sandbox, FENCE) == [b"here\n"]


async def test_who_was_superseded_while_it_was_made_does_not_get_it(tmp_path, monkeypatch):
    """Red when the attempt is compared before the wait alone: two executors would hold one sandbox."""
    find = Snapshots.find
    later = Fence(FENCE.key, 2)
    async with registry_in(tmp_path) as (registry, _):

        async def superseded_meanwhile(snapshots, key):
            registry.admit(later)
            return await find(snapshots, key)

        monkeypatch.setattr(Snapshots, "find", superseded_meanwhile)
        registry.admit(FENCE)
        with pytest.raises(StaleAttempt):
            await registry.acquire(FENCE)
        sandbox = registry.find(later)
        with pytest.raises(StaleAttempt):
            registry.find(FENCE)
        with pytest.raises(StaleAttempt):
            await said(sandbox, FENCE)
        assert await said(sandbox, later) == [b"here\n"]


async def test_a_removal_for_an_attempt_leaves_its_successors_sandbox(tmp_path, monkeypatch):
    """Red when only the run is looked at: the removal waits until the sandbox is made, which is the successor's by then."""
    find = Snapshots.find
    later = Fence(FENCE.key, 2)
    async with registry_in(tmp_path) as (registry, _):

        async def removed_meanwhile(snapshots, key):
            registry.dismiss(FENCE.key, FENCE.attempt)
            registry.admit(later)
            return await find(snapshots, key)

        monkeypatch.setattr(Snapshots, "find", removed_meanwhile)
        registry.admit(FENCE)
        with pytest.raises(StaleAttempt):
            await registry.acquire(FENCE)
        await eventually(lambda: len(registry._background) == 1, what="the removal has ended")
        assert await said(registry.find(later), later) == [b"here\n"]


async def test_a_later_attempt_ends_what_the_agent_has_not_taken_yet(tmp_path):
    """Red when an operation is known to be under way only once the agent has taken it: it would run beside the successor."""
    later = Fence(FENCE.key, 2)
    async with registry_in(tmp_path) as (registry, _):
        sandbox = (await registry.acquire(FENCE)).sandbox
        flushed = sandbox._link.flushed

        async def superseded_meanwhile():
            sandbox._link.flushed = flushed
            registry.admit(later)
            await flushed()

        registry.admit(FENCE)
        sandbox._link.flushed = superseded_meanwhile
        with pytest.raises(StaleAttempt):
            await said(sandbox, FENCE)


async def test_a_loss_is_told_once_to_who_comes_while_the_sandbox_is_removed(tmp_path, monkeypatch):
    """Red when it is noted only after the removal: who got the next sandbox meanwhile would hear of that one that it was lost."""
    destroy = Sandbox.destroy
    async with registry_in(tmp_path) as (registry, _):
        registry.admit(FENCE)
        await registry.acquire(FENCE)
        told = []

        async def come_meanwhile(sandbox):
            monkeypatch.setattr(Sandbox, "destroy", destroy)
            told.append((await registry.acquire(FENCE)).lost)
            await destroy(sandbox)

        monkeypatch.setattr(Sandbox, "destroy", come_meanwhile)
        await registry.remove(FENCE.key, lost="why")
        assert told == ["why"]
        assert await said(registry.find(FENCE), FENCE) == [b"here\n"]


async def test_a_generation_that_is_over_goes_also_where_the_next_cannot_be_made_now(tmp_path):
    """Red when it is removed only by who takes its place. It would be kept, as idle or at a drain, for the generation that has
    spoken: this would begin with the files of the one before, in place of the snapshot that it was restored with."""
    later = Fence(FENCE.key, 2)
    async with registry_in(tmp_path) as (registry, _):
        registry.admit(FENCE)
        await registry.acquire(FENCE, anew=True)
        registry.admit(later)
        with pytest.raises(HostUnavailable, match="cut off"):
            await registry.acquire(later, may_create=False, anew=True)
        assert registry.held() == []


@pytest.mark.parametrize("error", [UnicodeEncodeError("utf-8", "\ud800", 0, 1, "x"), RuntimeError("x")])
async def test_whatever_is_wrong_with_one_sandbox_the_host_starts(tmp_path, monkeypatch, error):
    """Red when adoption expects certain errors only: one sandbox would keep the host, and all others, from coming back."""

    async def fails(*_):
        raise error

    monkeypatch.setattr(Sandbox, "adopt", fails)
    async with registry_in(tmp_path) as (registry, _):
        key = FENCE.key
        (tmp_path / "sandboxes" / "one").mkdir()
        kept = Kept("one", key.tenant, key.user_id, str(key.run_id), 1, "default", "handle", "secret", 0.0)
        registry._state.save(kept)
        await registry.open()
        assert len(registry) == 1, "until it is known, it takes its room"
        await registry.adopted(key)
        with pytest.raises(SandboxLost, match="while its host was away"):
            registry.find(FENCE)
        assert len(registry) == 0
        assert not list((tmp_path / "sandboxes").iterdir())
        assert not registry._state.load()
