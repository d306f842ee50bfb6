"""What shares a transaction, and what those who share one must not do to one another."""

import asyncio

import psycopg
import pytest
from psycopg_pool import PoolTimeout

from sandfleet.shared.db.group_commit import GroupCommit
from tests.waiting import eventually

NO_ANSWER = [
    psycopg.OperationalError("connection lost"),
    psycopg.InterfaceError("connection closed"),
    psycopg.errors.AdminShutdown("terminating connection"),
    PoolTimeout("no connection"),
    OSError("unreachable"),
]
REFUSALS = [
    psycopg.errors.DataError("no JSON"),
    psycopg.errors.StatementTooComplex("stack depth limit exceeded"),  # an OperationalError to psycopg
    psycopg.errors.DeadlockDetected("deadlock detected"),  # this one, too
    TypeError("not serializable"),
]


class Database:
    """Commits what it is given when it is let go: each transaction waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[list[int]] = []
        self.committed: list[int] = []
        self.poison: dict[int, Exception] = {}

    async def commit(self, items):
        self.begun.append(list(items))
        await self.gate.wait()
        for item in items:
            if item in self.poison:
                raise self.poison[item]
        self.committed += items
        return [-item for item in items]


async def under_way(database, count, key="tenant"):
    """A group commit whose first transaction, of item 0, is under way, and tasks for the items 0 to ``count`` - 1."""
    group = GroupCommit(database.commit)
    tasks = [asyncio.create_task(group.do(key, item)) for item in range(count)]
    await eventually(lambda: database.begun)
    return group, tasks


async def test_nobody_is_answered_before_the_commit():
    """Red when an answer does not wait for the transaction: the run would be acknowledged, and could be lost."""
    database = Database()
    _, (task,) = await under_way(database, 1)
    await asyncio.wait([task], timeout=0.1)
    assert not task.done()
    database.gate.set()
    assert await task == 0
    assert database.committed == [0]


async def test_what_arrives_meanwhile_shares_the_next_transactions():
    """Twenty at most. Red when each has one of its own, or when one grows without bound and holds its row for long."""
    database = Database()
    _, tasks = await under_way(database, 42)
    database.gate.set()
    assert await asyncio.gather(*tasks) == [-item for item in range(42)]
    assert [len(items) for items in database.begun] == [20, 20, 2]


async def test_keys_do_not_wait_for_one_another():
    """Red when there is one queue for all: a tenant whose row is locked would stop the others."""
    database = Database()
    group, (held_up,) = await under_way(database, 1)
    other = asyncio.create_task(group.do("other", 7))
    await eventually(lambda: database.begun == [[0], [7]], 10)
    database.gate.set()
    assert await asyncio.gather(held_up, other) == [0, -7]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
async def test_an_item_that_is_refused_fails_alone(error):
    """Red when a refusal is given to all that share its transaction, or ends the queue."""
    database = Database()
    database.poison = {2: error}
    _, tasks = await under_way(database, 4)
    database.gate.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [0, -1, error, -3]


@pytest.mark.parametrize("error", NO_ANSWER, ids=lambda error: type(error).__name__)
async def test_without_an_answer_all_that_wait_fail_at_once(error):
    """Whether their transaction was committed nobody knows. Red when items are tried again one by one, each of which
    waits for a dead server behind those before it."""
    database = Database()
    database.poison = {0: error}
    group, tasks = await under_way(database, 30)
    database.gate.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [error] * 30
    assert len(database.begun) == 1
    assert await group.do("tenant", 30) == -30  # the next one finds out for itself


async def test_a_server_that_dies_while_items_are_tried_alone_fails_the_rest():
    """Red when an outage that begins there leaves somebody without an answer."""
    database = Database()
    lost = psycopg.OperationalError("connection lost")
    refused = psycopg.errors.DataError("no JSON")
    database.poison = {1: refused, 2: lost}
    _, tasks = await under_way(database, 30)
    database.gate.set()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [0, refused] + [lost] * 28


@pytest.mark.parametrize("which", [0, 1], ids=["under way", "waiting"])
async def test_who_is_cancelled_takes_nobody_along(which):
    """Red when cancelling one cancels the transaction, or its answer cannot be given and the others' is lost."""
    database = Database()
    database.poison = {}
    _, tasks = await under_way(database, 25)
    tasks[which].cancel()
    await asyncio.wait([tasks[which]])
    database.gate.set()
    left = [task for task in tasks if task is not tasks[which]]
    assert await asyncio.gather(*left) == [-item for item in range(25) if item != which]
    assert tasks[which].cancelled()


async def test_what_was_cancelled_before_its_turn_is_not_committed():
    """Red when a run is made for a client that is gone, though there was time to see it."""
    database = Database()
    group, (first,) = await under_way(database, 1)
    second = asyncio.create_task(group.do("tenant", 1))
    await asyncio.sleep(0)
    second.cancel()
    database.gate.set()
    assert await first == 0
    assert await group.do("tenant", 2) == -2
    assert database.committed == [0, 2]


async def test_when_the_loop_ends_nobody_is_left_waiting():
    """Red when the end of the task that serves them leaves those that wait for it without an answer."""
    database = Database()
    group, tasks = await under_way(database, 25)
    (serving,) = group._tasks
    serving.cancel()
    await asyncio.wait(tasks, timeout=60)
    assert all(task.cancelled() for task in tasks)
