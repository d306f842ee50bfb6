"""Placement of sandboxes on hosts, and runs that wait for room."""

import asyncio

import psycopg
import pytest
from psycopg.types.json import Jsonb

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.invariants.runs import check_runs
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import Ending, claim, finish
from sandfleet.shared.store.placements import Need, know_sandbox, place, suspend_for_room
from sandfleet.shared.store.submission import Submission, submit
from sandfleet.shared.store.sweep import sweep

MIB = 2**20
NEED = Need("default", 512 * MIB, 256)
END = Ending("success", '[[0, "metadata", "{}"], [1, "end", "null"]]')


class Fleet:
    """A database with hosts and runs, worked on as executors and hosts do."""

    def __init__(self, database, connection):
        self.database = database
        self.connection = connection

    async def host(
        self,
        name,
        most,
        *,
        memory=1 << 40,
        remote="http://x:1",
        draining=False,
        silent_s=0.0,
        templates=None,
        disk=None,
    ):
        """``templates``: what it says it makes, with the bytes of disk that each takes; None: it says nothing of them."""
        offers = (
            None if templates is None else Jsonb({name: {"disk": size} for name, size in templates.items()})
        )
        await self.connection.execute(
            "insert into hosts (host_id, instance, address, remote, backend, room, sandboxes, memory, pids, most,"
            " memory_taken, pids_taken, draining, heartbeat_at, templates, disk, disk_taken) values (%s, 'i', 'unix:x', %s,"
            " 'docker', 0, 0, %s, 1000000, %s, 0, 0, %s, clock_timestamp() - make_interval(secs => %s), %s, %s, 0)",
            (name, remote, memory, most, draining, silent_s, offers, disk),
        )

    async def runs(self, count, tenant="acme"):
        """New runs of a tenant, claimed."""
        await create_key(self.connection, Owner(tenant, "ann"), "test")
        async with open_pool(self.database, 2) as pool:
            for _ in range(count):
                key = RunKey(tenant, "ann", new_id())
                await submit(
                    pool,
                    Submission(
                        key, new_id(), graph_assistant_id("g"), "g", "default", "{}", create_thread=True
                    ),
                )
        return await self.claim(count)

    async def claim(self, count):
        return [
            r.fence for r in await claim(self.connection, "default", "me", 60, count, longest_waiting=False)
        ]

    async def place(self, fence, need=NEED, own=None, refused=()):
        return await place(self.connection, fence, need, own, refused)

    async def wait_for_room(self, fence, need=NEED):
        assert (await self.place(fence, need)).outcome == "full"
        return await suspend_for_room(self.connection, fence)

    async def sweep(self):
        return await sweep(self.connection, 5, 60, 3600)

    async def gates(self):
        cursor = await self.connection.execute("select run_id, status, gate from runs order by seq")
        return [(status, gate) for _, status, gate in await cursor.fetchall()]

    async def hosts_of(self, fences):
        cursor = await self.connection.execute("select run_id, host_id from placements")
        found = dict(await cursor.fetchall())
        return [found.get(fence.key.run_id) for fence in fences]

    async def healthy(self):
        assert (await check_runs(self.connection)).violations == []


@pytest.fixture
async def fleet(database):
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "truncate runs, threads, journal, checkpoints, api_keys, tenants, flows, vclock, hosts, placements cascade"
        )
        yield Fleet(database, connection)


async def test_the_own_host_comes_first_then_the_emptiest(fleet):
    """Red when placement does not prefer the executor's machine, or fills one host after the other."""
    await fleet.host("a", 2, memory=2048 * MIB)
    await fleet.host("b", 2, memory=4096 * MIB)
    one, two, three, four, five = await fleet.runs(5)
    assert (await fleet.place(one, own="a")).host_id == "a"
    assert (await fleet.place(two)).host_id == "b"
    assert (await fleet.place(three, own="a")).host_id == "a"
    assert (await fleet.place(four, own="a")).host_id == "b", "its own is full"
    assert (await fleet.place(five, own="a")).outcome == "full"
    assert (await fleet.place(one, own="b")).host_id == "a", "a run that has a place keeps it"
    await fleet.healthy()


@pytest.mark.parametrize("limit", ["memory", "pids", "count"])
async def test_each_limit_of_a_host_holds(fleet, limit):
    """Red when one of the three is not counted."""
    await fleet.host("a", 2 if limit == "count" else 100, memory=1024 * MIB if limit == "memory" else 1 << 40)
    need = Need("default", 512 * MIB, 500_000 if limit == "pids" else 1)
    outcomes = [(await fleet.place(fence, need)).outcome for fence in await fleet.runs(3)]
    assert outcomes == ["placed", "placed", "full"]


async def test_an_empty_host_takes_one_of_any_size(fleet):
    """Red when a template that is larger than what is given away waits for ever."""
    await fleet.host("a", 10, memory=MIB)
    one, two = await fleet.runs(2)
    assert [(await fleet.place(fence)).outcome for fence in (one, two)] == ["placed", "full"]


async def test_what_a_host_says_it_holds_counts_too(fleet):
    """Red when only placements count: a sandbox that is still being removed takes room without one."""
    await fleet.host("a", 1)
    (one,) = await fleet.runs(1)
    await fleet.connection.execute("update hosts set sandboxes = 1")
    assert (await fleet.place(one)).outcome == "full"
    await fleet.connection.execute("update hosts set sandboxes = 0, heartbeat_at = clock_timestamp()")
    assert (await fleet.place(one)).outcome == "placed"


async def test_hosts_that_drain_are_silent_or_cannot_be_reached_get_none(fleet):
    """Red when one of the three is chosen."""
    await fleet.host("draining", 9, draining=True)
    await fleet.host("silent", 9, silent_s=11)
    (one,) = await fleet.runs(1)
    assert (await fleet.place(one)).outcome == "no_host"
    await fleet.host("elsewhere", 9, remote=None)
    assert (await fleet.place(one, own="here")).outcome == "full"
    assert (await fleet.place(one, own="elsewhere")).host_id == "elsewhere"


async def test_many_at_once_never_overfill_a_host(fleet):
    """Red without the lock on the host: all see the same free place."""
    await fleet.host("a", 3)
    await fleet.host("b", 4)
    fences = await fleet.runs(12)

    async def place_one(fence):
        async with await psycopg.AsyncConnection.connect(fleet.database, autocommit=True) as connection:
            return (await place(connection, fence, NEED, None, ())).host_id

    chosen = await asyncio.gather(*map(place_one, fences))
    assert (chosen.count("a"), chosen.count("b"), chosen.count(None)) == (3, 4, 5)


async def test_a_superseded_attempt_gets_no_place(fleet):
    """Red when placement is not fenced."""
    await fleet.host("a", 3)
    (old,) = await fleet.runs(1)
    await fleet.connection.execute("update runs set attempt = 2")
    assert (await fleet.place(old)).outcome == "superseded"
    await know_sandbox(fleet.connection, old, "s1")
    assert await fleet.hosts_of([old]) == [None]
    assert await suspend_for_room(fleet.connection, old) == {}
    assert await fleet.gates() == [("running", None)]


async def test_a_run_with_a_sandbox_stays_with_a_silent_host_for_a_minute(fleet):
    """Red when a host that restarts loses its runs, or one that is gone keeps them."""
    await fleet.host("a", 3)
    (one,) = await fleet.runs(1)
    await fleet.place(one)
    await know_sandbox(fleet.connection, one, "s1")
    await fleet.host("b", 3)
    assert (await fleet.place(one, refused=["a"])).outcome == "away"
    await fleet.connection.execute(
        "update hosts set heartbeat_at = heartbeat_at - interval '61 s' where host_id = 'a'"
    )
    moved = await fleet.place(one, refused=["a"])
    assert (moved.host_id, moved.sandbox_id) == ("b", "s1"), (
        "what it knew says that another sandbox means a loss"
    )


async def test_a_run_whose_host_has_signed_off_moves_at_once(fleet):
    await fleet.host("a", 3)
    (one,) = await fleet.runs(1)
    await fleet.place(one)
    await fleet.connection.execute("delete from hosts")
    await fleet.host("b", 3)
    assert (await fleet.place(one)).host_id == "b"


async def test_a_run_waits_for_room_without_a_slot_and_gets_it_when_another_ends(fleet):
    """Red when a waiting run keeps its tenant's slot, or nobody gives it the room."""
    await fleet.host("a", 1)
    first, second = await fleet.runs(2)
    await fleet.place(first)
    await fleet.connection.execute("update tenants set max_in_flight = 2")
    (third,) = [RunKey("acme", "ann", new_id())]
    async with open_pool(fleet.database, 2) as pool:
        await submit(
            pool,
            Submission(third, new_id(), graph_assistant_id("g"), "g", "default", "{}", create_thread=True),
        )
    assert (await fleet.gates())[2] == ("pending", "tenant")
    assert await fleet.wait_for_room(second) == {"default": 1}, "its slot goes to the third"
    assert await fleet.gates() == [("running", None), ("pending", "room"), ("pending", None)]
    await fleet.healthy()
    await fleet.sweep()
    assert (await fleet.gates())[1] == ("pending", "room"), "there is no room yet"
    await finish(fleet.connection, first, END)
    assert await fleet.sweep() == {"default": 1}
    assert (await fleet.gates())[1:] == [("pending", None), ("pending", None)]
    assert await fleet.hosts_of([second]) == ["a"]
    await fleet.healthy()
    again = await fleet.claim(2)
    (resumed,) = [fence for fence in again if fence.key == second.key]
    assert resumed.attempt == 2
    assert (await fleet.place(resumed)).host_id == "a", "the room that it was given is kept for it"


async def test_room_goes_in_the_fair_order(fleet):
    """Red when a tenant with many waiting runs keeps another one from room."""
    await fleet.host("a", 1)
    many = await fleet.runs(5, "many")
    await fleet.place(many[0])
    for fence in many[1:]:
        await fleet.wait_for_room(fence)
    (few,) = await fleet.runs(1, "few")
    await fleet.wait_for_room(few)
    await finish(fleet.connection, many[0], END)
    await fleet.sweep()
    placed = [host for host in await fleet.hosts_of([few, *many[1:]]) if host]
    assert len(placed) == 1
    first_two = await fleet.hosts_of([few, many[1]])
    assert "a" in first_two
    (given,) = await fleet.claim(1)
    await finish(fleet.connection, given, END)
    await fleet.sweep()
    assert "a" in await fleet.hosts_of([few]) or given.key == few.key


async def test_one_that_needs_much_is_not_passed_by_for_ever(fleet):
    """Red when small ones take each place that becomes free."""
    await fleet.host("a", 10, memory=1024 * MIB)
    small_one, small_two, big, late = await fleet.runs(4)
    large = Need("large", 1024 * MIB, 1)
    for fence in (small_one, small_two):
        await fleet.place(fence)
    await fleet.wait_for_room(big, large)
    await fleet.connection.execute(
        "update placements set placed_at = placed_at - interval '61 s' where host_id is null"
    )
    await fleet.wait_for_room(late)
    await finish(fleet.connection, small_one, END)
    await fleet.sweep()
    assert await fleet.hosts_of([big, late]) == [None, None], "half of what it needs is kept for it"
    await finish(fleet.connection, small_two, END)
    await fleet.sweep()
    assert await fleet.hosts_of([big, late]) == ["a", None]


async def test_one_that_no_host_could_ever_hold_blocks_nobody(fleet):
    await fleet.host("a", 10, memory=1024 * MIB)
    holder, huge, small = await fleet.runs(3)
    await fleet.place(holder)
    await fleet.wait_for_room(huge, Need("huge", 4096 * MIB, 1))
    await fleet.connection.execute(
        "update placements set placed_at = placed_at - interval '61 s' where host_id is null"
    )
    await fleet.connection.execute("update hosts set most = 1")
    await fleet.wait_for_room(small)
    await fleet.connection.execute("update hosts set most = 10")
    await fleet.sweep()
    assert await fleet.hosts_of([huge, small]) == [None, "a"]


async def test_a_run_that_waits_can_be_cancelled(fleet):
    """Red when its place in the queue, or its thread, stays behind."""
    await fleet.host("a", 1)
    first, second = await fleet.runs(2)
    await fleet.place(first)
    await fleet.wait_for_room(second)
    async with open_pool(fleet.database, 2) as pool:
        await request_cancel(pool, second.key, "interrupt")
    assert (await fleet.gates())[1] == ("interrupted", None)
    assert await fleet.hosts_of([second]) == [None]
    cursor = await fleet.connection.execute("select count(*) from placements")
    assert await cursor.fetchone() == (1,)
    await fleet.sweep()


async def test_one_that_is_to_be_cancelled_does_not_wait(fleet):
    """Red when a cancel that comes while no room is found waits for room, too."""
    await fleet.host("a", 1)
    first, second = await fleet.runs(2)
    await fleet.place(first)
    await fleet.connection.execute(
        "update runs set cancel_action = 'interrupt' where run_id = %s", (second.key.run_id,)
    )
    assert await fleet.wait_for_room(second) == {"default": 1}
    assert (await fleet.gates())[1] == ("pending", None)


async def test_waiting_and_leases_survive_a_crash_between_the_two(fleet):
    """Red when the wish is forgotten with the executor that noted it: its lease runs out and it asks again."""
    await fleet.host("a", 1)
    first, second = await fleet.runs(2)
    await fleet.place(first)
    assert (await fleet.place(second)).outcome == "full"
    await fleet.connection.execute(
        "update runs set status = 'pending', lease_owner = null, lease_expires_at = null where run_id = %s",
        (second.key.run_id,),
    )
    await fleet.sweep()
    await fleet.healthy()
    (again,) = await fleet.claim(1)
    await finish(fleet.connection, first, END)
    assert (await fleet.place(again)).host_id == "a"


OPEN = Need("open", MIB, 1)


async def test_a_run_goes_to_a_host_that_makes_its_template(fleet):
    """Though another is emptier, and nearer. Red when only room counts: the run's first tool call fails each time."""
    await fleet.host("own", 9, memory=4096 * MIB, templates={"default": 0})
    await fleet.host("able", 9, memory=1024 * MIB, templates={"default": 0, "open": 0})
    one, two = await fleet.runs(2)
    assert (await fleet.place(one, OPEN, own="own")).host_id == "able"
    assert (await fleet.place(two, own="own")).host_id == "own"


async def test_a_run_waits_for_a_host_that_makes_its_template(fleet):
    """While that one is full or silent for a moment. Red when it is given room that it cannot use, or when one that waits so
    stands in the way of others for the room of hosts that are no use to it."""
    await fleet.host("unable", 2, templates={"default": 0})
    await fleet.host("able", 1, templates={"default": 0, "open": 0})
    first, second, third, fourth, fifth = await fleet.runs(5)
    assert (await fleet.place(first, OPEN)).host_id == "able"
    await fleet.wait_for_room(second, OPEN)
    assert [(await fleet.place(fence)).host_id for fence in (third, fourth)] == ["unable"] * 2
    await fleet.wait_for_room(fifth)
    await fleet.connection.execute(
        "update placements set placed_at = placed_at - interval '61 s' where template = 'open' and host_id is null"
    )
    await fleet.sweep()
    assert await fleet.hosts_of([second, fifth]) == [None, None]
    await fleet.healthy()
    await finish(fleet.connection, third, END)
    await fleet.sweep()
    assert await fleet.hosts_of([second, fifth]) == [None, "unable"]
    await fleet.connection.execute(
        "update hosts set heartbeat_at = heartbeat_at - interval '11 s' where host_id = 'able'"
    )
    await fleet.connection.execute("update hosts set most = 9 where host_id = 'unable'")
    await finish(fleet.connection, first, END)
    await fleet.sweep()
    assert await fleet.hosts_of([second]) == [None], "it is silent for a moment"
    await fleet.connection.execute("update hosts set heartbeat_at = clock_timestamp()")
    await fleet.sweep()
    assert await fleet.hosts_of([second]) == ["able"]


async def test_if_no_host_makes_a_template_one_of_them_says_why(fleet):
    """Red when the run waits for a host that may never come, and nobody hears of the reason."""
    await fleet.host("unable", 9, templates={"default": 0})
    (one,) = await fleet.runs(1)
    assert (await fleet.place(one, OPEN)).host_id == "unable"


async def test_workspaces_on_disk_are_never_promised_more_than_there_is(fleet):
    """Red when disk is not counted, or an empty host takes more of it than it has."""
    await fleet.host("a", 100, disk=10 * MIB, templates={"default": 0, "open": 4 * MIB, "vast": 11 * MIB})
    fences = await fleet.runs(6)
    assert (await fleet.place(fences[0], Need("vast", MIB, 1))).outcome == "full"
    outcomes = [(await fleet.place(fence, OPEN)).outcome for fence in fences[1:4]]
    assert outcomes == ["placed", "placed", "full"]
    assert (await fleet.place(fences[4])).outcome == "placed", "one in memory takes none"
    await finish(fleet.connection, fences[1], END)
    await fleet.connection.execute("update hosts set disk_taken = %s", (8 * MIB,))
    assert (await fleet.place(fences[5], OPEN)).outcome == "full", "the host has not removed it yet"
