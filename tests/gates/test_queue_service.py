"""What permits rely on of the queue's service, where its makers differ: an old receipt deletes the message on LocalStack and
is refused by MiniStack. On AWS it may do either."""

import asyncio

import pytest

from sandfleet.fleet.executor import permit_keeper
from sandfleet.shared.permits import Permits
from tests.gates.test_permits import keeping, permits, receipts
from tests.waiting import eventually

__all__ = ["permits"]

pytestmark = pytest.mark.emulators


async def taken_from_its_holder(permits: Permits) -> tuple[str, str]:
    """The old receipt of a permit that came back to the queue while its holder stood still, and the new one of whoever has
    received it since."""
    await permits.send("default", 1)
    (old,) = await permits.receive("default", 1, 1, 0)
    (new,) = await permits.receive("default", 1, 5, 60)
    assert old != new
    return old, new


async def test_an_old_receipt_is_deleted_or_refused_in_silence(permits):
    """Beside others, which are deleted. Red when a refusal gets out of the call, or keeps the others in the queue."""
    old, new = await taken_from_its_holder(permits)
    await permits.send("default", 1)
    (other,) = await permits.receive("default", 1, 5, 60)
    await permits.delete("default", [old, other])
    await permits.delete("default", [new])
    assert await counts(permits) == (0, 0)


async def test_a_permit_that_is_gone_keeps_no_other_from_being_extended(permits):
    """Its holder stood still, and somebody else has deleted it. Red when the refusal gets out of the call: an executor would
    extend nothing any more."""
    old, new = await taken_from_its_holder(permits)
    await permits.delete("default", [new])
    await permits.send("default", 1)
    (held,) = await permits.receive("default", 1, 5, 60)
    await permits.extend("default", [old, held], 0)  # an extension that shows at once
    assert len(await permits.receive("default", 10, 5, 60)) == 1


async def test_a_permit_that_comes_back_has_counted_a_death(permits):
    """Red when a queue counts otherwise: dead permits would be none, or all."""
    await permits.send("default", 1)
    assert len(await permits.receive("default", 1, 5, 0)) == 1
    assert await eventually(lambda: receipts(permits)) == ["2"]


async def test_permits_are_sent_and_deleted_in_batches_of_any_number(permits):
    """Red when more than ten are put into one call, which every service refuses."""
    await permits.send("default", 23)
    assert await permits.visible("default") == 23
    handles: list[str] = []

    async def all_received() -> bool:
        handles.extend(await permits.receive("default", 10, 0, 60))
        return len(handles) == 23

    await eventually(all_received)
    await permits.extend("default", handles, 60)
    await permits.delete("default", handles)
    assert await counts(permits) == (0, 0)


async def test_a_poll_hears_of_a_permit_that_is_sent_meanwhile(permits):
    """Red when a poll looks once: an idle executor would learn of a run only with its next one."""
    poll = asyncio.create_task(permits.receive("default", 1, 20, 60))
    for _ in range(5):  # by then it has looked
        await permits.visible("default")
    await permits.send("default", 1)
    assert len(await poll) == 1


async def test_a_receipt_that_ends_soon_is_replaced(permits, monkeypatch):
    """By a fresh permit, since SQS ends a receipt after twelve hours, whatever extends it. Red when the old one is only
    dropped: the run that it stands for would have no permit any more."""
    monkeypatch.setattr(permit_keeper, "_REPLACE_AFTER_S", -1.0)
    busy = 0
    async with keeping(permits, 1, lambda: busy) as (keeper, _):
        await permits.send("default", 1)
        await eventually(lambda: keeper._held)
        busy, keeper._visibility_s = 1, 0.3
        extending = asyncio.create_task(keeper.extend())
        await eventually(lambda: not keeper._held)
        assert await eventually(lambda: receipts(permits)) == ["1"]

        async def deleted() -> bool:
            return await counts(permits) == (0, 1)

        await eventually(deleted, what="the old permit is gone")
        extending.cancel()
        await asyncio.wait([extending])


async def counts(permits: Permits) -> tuple[int, int]:
    """How many permits are in the queue, and how many somebody holds."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    client = await permits.client()
    found = (await client.get_queue_attributes(QueueUrl=permits.url("default"), AttributeNames=names))[
        "Attributes"
    ]
    return int(found[names[0]]), int(found[names[1]])
