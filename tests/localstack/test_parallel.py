"""Steps side by side, and steps that must not be broken off."""

import asyncio

import pytest

from sandfleet.localstack.parallel import parallel, uninterrupted


async def test_a_failure_cancels_the_others_and_comes_out_as_itself() -> None:
    """Breaks if it comes in an exception group, or if the other step goes on."""
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await parallel(forever(), fails())
    assert ended == ["cancelled"]


async def test_cleaning_up_finishes_although_it_is_cancelled() -> None:
    """A second Ctrl-C, or one that comes late, leaves nothing half done. Breaks if the step is awaited directly."""
    begun, may_end, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def clean_up() -> None:
        begun.set()
        await may_end.wait()
        done.set()

    task = asyncio.create_task(uninterrupted(clean_up()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done.is_set()
