"""How a host removes the sandboxes of runs, with bwrap and a registry in this process."""

import asyncio

import pytest

from sandfleet.fleet.host import registry as registry_module
from sandfleet.fleet.host.registry import Registry
from sandfleet.fleet.host.snapshots import Snapshots
from tests.sandbox.test_hand_over import FENCE, registry_in
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("nothing_to_begin_with")


async def test_a_removal_that_takes_long_is_not_begun_again_meanwhile(tmp_path, monkeypatch):
    """Red when what is being removed is taken for what could not be removed: a busy engine gets each removal twice, and
    whoever asks second is told that it is going and gives its room free while it is still there."""
    go_on, asked, rounds = asyncio.Event(), [], []
    monkeypatch.setattr(registry_module, "_TEND_EVERY_S", 0.01)
    monkeypatch.setattr(Registry, "_measure", lambda _: rounds.append(None))
    async with registry_in(tmp_path) as (registry, backend):
        destroy = backend.destroy

        async def slow(handle):
            asked.append(handle)
            await go_on.wait()
            await destroy(handle)

        await registry.acquire(FENCE)
        monkeypatch.setattr(backend, "destroy", slow)
        removing = asyncio.create_task(registry.remove(FENCE.key))
        tending = asyncio.create_task(registry.tend())
        try:
            await eventually(
                lambda: len(asked) > 1 or len(rounds) > 3, what="it has been looked for what is to be removed"
            )
            assert len(asked) == 1
        finally:
            tending.cancel()
            go_on.set()
            await removing


async def test_a_sandbox_whose_making_fails_keeps_no_other_from_being_removed(tmp_path, monkeypatch):
    """The disk is full, say, while the host stops. Red when who removes is given the maker's failure: the host would go and
    leave its other sandboxes."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def fails(snapshots, key):
        begun.set()
        await go_on.wait()
        raise OSError("no space left")

    async with registry_in(tmp_path) as (registry, _):
        other = FENCE._replace(key=FENCE.key._replace(user_id="bob"))
        await registry.acquire(other)
        monkeypatch.setattr(Snapshots, "find", fails)
        asking = asyncio.create_task(registry.acquire(FENCE))
        await begun.wait()
        closing = asyncio.create_task(registry.close())
        await eventually(lambda: registry.draining, what="it closes")
        go_on.set()
        await closing
        assert not registry.all_keys()
        assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], OSError)
