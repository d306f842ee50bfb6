"""Who gets a permit, and who takes one."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from sandfleet.fleet.executor.permit_keeper import PermitKeeper
from sandfleet.shared import permits as permits_module
from sandfleet.shared import waker as waker_module
from sandfleet.shared.dead_letters import dead_letter_urls, dead_permits, redrive
from sandfleet.shared.ids import new_id
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.ready import count_ready
from sandfleet.shared.store.submission import submit
from sandfleet.shared.waker import Waker
from tests.gates.test_gates import pool, submission
from tests.waiting import eventually

__all__ = ["pool"]

pytestmark = pytest.mark.emulators


@pytest.fixture
async def permits(servers, monkeypatch):
    """New queues, which may be slow: what calls may take is tested elsewhere."""
    monkeypatch.setattr(permits_module, "_LIMIT_S", 60.0)
    found = Permits(
        Settings(aws_endpoint_url=servers.aws_endpoint_url, queue_urls=await servers.create_queues())
    )
    await found.receive("default", 1, 0, 60)  # opens the client, which takes longer than a send may
    yield found
    await found.aclose()


@pytest.fixture
def patient(monkeypatch):
    """Permits are held back for ever, unless something ends the wait."""
    monkeypatch.setattr(waker_module, "_HOLD_S", 3600.0)


@asynccontextmanager
async def waking(redis_url, permits, pool):
    async def ready(name, limit):
        async with pool.connection() as connection:
            return await count_ready(connection, name, limit)

    async with Redis.from_url(redis_url) as redis:
        waker = Waker(redis, permits, ready)
        yield waker
        await waker.flush()


async def received(permits):
    return len(await permits.receive("default", 10, 0, 60))


async def submit_some(pool, count):
    for _ in range(count):
        await submit(pool, submission("flood", new_id()))


async def test_a_run_that_an_executor_takes_at_once_needs_no_permit(pool, redis_url, permits, patient):
    """Red when a permit is sent for each run: three calls of the queue's API more for every run."""
    async with waking(redis_url, permits, pool) as waker:
        await submit_some(pool, 2)
        waker.wake("default", 2)
        async with pool.connection() as connection:
            await claim(connection, "default", "x", 60, 2, longest_waiting=False)
        await waker.flush()
    assert await received(permits) == 0


async def test_a_run_that_nobody_takes_gets_a_permit(pool, redis_url, permits):
    """Red when nothing is sent after the ring: an executor that starts up or frees a slot elsewhere learns nothing."""
    async with waking(redis_url, permits, pool) as waker:
        await submit_some(pool, 3)
        async with pool.connection() as connection:
            await claim(connection, "default", "x", 60, 1, longest_waiting=False)
        waker.wake("default", 3)
        assert await eventually(lambda: received(permits)) == 2


async def test_without_redis_permits_are_sent_at_once(pool, permits, patient):
    """Red when permits are held back for executors that no ring has reached."""
    async with waking("redis://127.0.0.1:1/0", permits, pool) as waker:
        await submit_some(pool, 1)
        waker.wake("default")
        assert await eventually(lambda: received(permits)) == 1


async def test_when_postgresql_cannot_be_asked_each_run_gets_its_permit(redis_url, permits, patient):
    """Red when an outage between the commit and the look at PostgreSQL loses the permit."""

    async def away(name, limit):
        raise OSError

    async with Redis.from_url(redis_url) as redis:
        waker = Waker(redis, permits, away)
        waker.wake("default", 2)
        await waker.flush()
    assert await received(permits) == 2


async def hidden(permits):
    """How many permits somebody has received and not deleted."""
    name = "ApproximateNumberOfMessagesNotVisible"
    client = await permits.client()
    found = await client.get_queue_attributes(QueueUrl=permits.url("default"), AttributeNames=[name])
    return int(found["Attributes"][name])


async def receipts(permits):
    """How often each permit that is there has been received, this time included."""
    name = "ApproximateReceiveCount"
    client = await permits.client()
    found = await client.receive_message(QueueUrl=permits.url("default"), AttributeNames=[name])
    return [message["Attributes"][name] for message in found.get("Messages", ())]


def watch(permits, polls):
    """The same queues; notes each poll in ``polls``, as a list that gets the number of permits when the poll has ended."""

    class Watched(Permits):
        async def receive(self, *given):
            poll = []
            polls.append(poll)
            found = await permits.receive(*given)
            poll.append(len(found))
            return found

        async def send(self, *given):
            await permits.send(*given)

        async def delete(self, *given):
            await permits.delete(*given)

    return Watched(Settings())


async def _at_once():
    pass


@asynccontextmanager
async def keeping(permits, slots, busy):
    """A keeper at work; yields it and the number of its polls that have ended, in a list."""
    polls = []
    keeper = PermitKeeper(
        permits,
        "default",
        slots=slots,
        long_poll_s=1,
        visibility_s=60,
        busy=busy,
        ready=_at_once,
        on_poll=lambda: polls.append(1),
    )
    receiving = asyncio.create_task(keeper.receive())
    try:
        yield keeper, polls
    finally:
        receiving.cancel()
        await asyncio.wait([receiving])


async def test_an_executor_without_a_free_slot_leaves_permits_to_others(permits):
    """Red when the keeper asks for as many permits as it has slots, whether or not they are taken."""
    polls = []
    watched = watch(permits, polls)
    async with keeping(watched, 10, lambda: 10), keeping(permits, 10, lambda: 0) as (idle, _):
        await permits.send("default", 8)
        await eventually(lambda: len(idle._held) == 8)
    assert polls == []


async def test_an_executor_that_fills_up_while_it_polls_passes_permits_on(permits):
    """Fresh ones, since receipts count deaths. Red when it keeps them, invisible to an idle executor for as long as its
    runs take, or lets them come back as they are."""
    busy, polls = 0, []
    async with keeping(watch(permits, polls), 1, lambda: busy) as (keeper, _):
        await eventually(lambda: polls)
        busy = 1
        await permits.send("default", 1)
        await eventually(lambda: [1] in polls)  # it has received the permit
        assert await eventually(lambda: receipts(permits)) == ["1"]
        assert keeper._held == []


async def test_surplus_permits_are_deleted(permits):
    """Red when a permit that found no run is kept: it would be extended for ever, and hide that nothing waits."""
    busy = 2
    async with keeping(permits, 3, lambda: busy) as (keeper, _):
        await permits.send("default", 1)
        await eventually(lambda: keeper._held)
        keeper.settle_soon()
        busy = 0
        keeper.settle_soon()
        await eventually(lambda: not keeper._held)
        await keeper.release()
    assert await hidden(permits) == 0


async def test_a_dead_permit_that_is_not_removed_is_counted(permits):
    """Red when the queue's answer is not looked at: who was told that it was sent anew finds it dead again."""
    queue = (await dead_letter_urls(permits))["default"]
    for _ in range(2):
        await (await permits.client()).send_message(QueueUrl=queue, MessageBody="{}")
    removed, listed_long_ago = await eventually(lambda: both(permits), what="two dead permits")
    assert await redrive(permits, [removed, replace(listed_long_ago, handle="of another time")]) == 1


async def both(permits):
    found = await dead_permits(permits, 10)
    return found if len(found) == 2 else None
