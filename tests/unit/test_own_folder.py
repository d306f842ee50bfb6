"""The folder of a sandbox host has one owner."""

import asyncio
import logging
from pathlib import Path

import pytest

from sandfleet.fleet.host import own_folder as module
from sandfleet.fleet.host.own_folder import of_the_dead, own_folder
from sandfleet.shared.errors import SandfleetError
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a look at a folder is over at once."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)


async def test_a_host_waits_for_a_reaper(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For as long as that clears the folder. Red when it takes the reaper for another host."""

    async def own() -> None:
        async with own_folder(tmp_path) as sandboxes:
            assert sandboxes.is_dir()

    async with own_folder(tmp_path):
        pass
    with caplog.at_level(logging.WARNING), of_the_dead(tmp_path) as dead:
        assert dead
        owning = asyncio.create_task(own())
        await eventually(lambda: "waits for a reaper" in caplog.text or owning.done())
        assert not owning.done()
    await owning


async def test_a_host_does_not_wait_for_another_host(tmp_path: Path) -> None:
    """Also where a reaper had the folder once. Red when a host leaves the reaper's word in the lock."""
    async with own_folder(tmp_path):
        pass
    with of_the_dead(tmp_path):
        pass
    async with own_folder(tmp_path):
        with of_the_dead(tmp_path) as dead:
            assert not dead
        with pytest.raises(SandfleetError, match="Another sandbox host"):
            async with own_folder(tmp_path):
                pass
