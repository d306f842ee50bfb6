"""How loaded a pool is, and who retires: read from a real database."""

import uuid
from typing import Any

import pytest

from sandfleet.fleet.executor.registration import Orders, heartbeat
from sandfleet.shared.db.pool import Pool
from sandfleet.shared.ids import new_id
from sandfleet.shared.scaling.decision import Memory
from sandfleet.shared.scaling.latencies import recent_latencies
from sandfleet.shared.scaling.load import busy_hosts, read_load, remember, retire, take_scaling_turn
from sandfleet.shared.store.claims import claim
from sandfleet.shared.store.submission import submit
from tests.functions.beats import beat, retired
from tests.gates.test_gates import submission


async def test_ready_runs_are_counted_and_their_age_is_the_databases(connection: Any, pool: Pool) -> None:
    """Red when the age is taken from a clock of ours, or from when the run was made."""
    for _ in range(3):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        "update runs set ready_at = ready_at - interval '40 s' where run_id = (select run_id from runs limit 1)"
    )
    load = await read_load(connection, "default")
    assert load.ready == 3
    assert 40 <= load.oldest_s < 70
    assert (await read_load(connection, "hosts")).ready == 0


async def test_capped_delayed_and_thread_busy_runs_scale_nothing_out(connection: Any, pool: Pool) -> None:
    """However many and old they are. Red when pending runs are counted instead of ready ones."""
    await connection.execute("update tenants set max_in_flight = 1")
    thread = new_id()
    await submit(pool, submission("a", thread))
    await claim(connection, "default", "e", 60, 1, longest_waiting=False)
    await submit(pool, submission("a", thread))  # its thread is busy
    await submit(pool, submission("a", new_id()))  # its tenant has no slot left
    await submit(pool, submission("a", new_id(), delay_s=3600.0))
    await connection.execute("update runs set created_at = created_at - interval '1 day'")
    gates = await (await connection.execute("select gate from runs where status = 'pending'")).fetchall()
    assert {gate for (gate,) in gates} == {"thread", "tenant", "time"}
    load = await read_load(connection, "default")
    assert (load.ready, load.oldest_s) == (0, 0.0)


async def test_executors_count_while_they_beat(connection: Any) -> None:
    """Red when one that has died counts as a free one."""
    await beat(connection, "busy", 3)
    await beat(connection, "idle", 0)
    await beat(connection, "dead", 0)
    await connection.execute(
        "update executors set heartbeat_at = heartbeat_at - interval '2 hours' where executor_id = 'dead'"
    )
    load = await read_load(connection, "default")
    assert (load.executors, load.idle, load.slots, load.busy) == (2, 1, 32, 3)


async def test_one_that_drains_is_no_more_counted_nor_kept_instead_of_another(connection: Any) -> None:
    """For as long as its runs last. Red when it counts while it beats: then there is one too many, and the new one, which
    has least to do, takes nothing until the old one has gone."""
    await beat(connection, "old", 3)
    await beat(connection, "old", 3, draining=True)
    await beat(connection, "new", 0)
    load = await read_load(connection, "default")
    assert (load.executors, load.idle, load.slots, load.busy) == (1, 1, 16, 0)
    await retire(connection, "default", load.executors - 1, 60)
    assert await retired(connection) == {"old"}
    await beat(connection, "old", 1, draining=True)
    await retire(connection, "default", 1, 60)
    await retire(connection, "default", 0, 60)
    assert await retired(connection) == {"old"}


async def test_a_host_is_not_idle_while_an_executor_drains_on_it(connection: Any) -> None:
    """Red when its runs are left out with its slots; one whose host takes nothing either does not count."""
    await host(connection, "i-1", 0, 0)
    await beat(connection, "old", 3, "i-1", draining=True)
    await beat(connection, "gone", 2, "i-2", draining=True)
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.executors, load.idle, load.slots, load.busy) == (1, 0, 0, 3)


async def test_the_duration_of_runs_is_that_of_the_last_ones(connection: Any, pool: Pool) -> None:
    """Red when it is not the pool's own, or counts the time of waiting."""
    assert (await read_load(connection, "default")).run_s is None
    for _ in range(2):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        """update runs set status = 'success', created_at = now() - interval '1 hour', started_at = now() - interval '20 s',
           finished_at = now() - interval '8 s'"""
    )
    assert (await read_load(connection, "default")).run_s == pytest.approx(12.0)
    assert (await read_load(connection, "hosts")).run_s is None


async def test_latencies_are_those_of_runs_that_ended_lately(connection: Any, pool: Pool) -> None:
    """Red when older ones count, another pool's, or when a stage that did not happen is taken for 0."""
    assert await recent_latencies(connection, "default") == {}
    for _ in range(4):
        await submit(pool, submission("a", new_id()))
    await connection.execute(
        """update runs set status = 'success', created_at = now() - interval '30 s', started_at = now() - interval '20 s',
             prepared_at = now() - interval '18 s', finished_at = now() - interval '10 s'
           where run_id in (select run_id from runs limit 3)"""
    )
    await connection.execute(
        "update runs set created_at = finished_at - interval '1 h', finished_at = now() - interval '2 h' "
        "where run_id = (select run_id from runs where finished_at is not null limit 1)"
    )
    found = await recent_latencies(connection, "default")
    assert found == pytest.approx(
        {
            "DispatchP50": 10,
            "DispatchP95": 10,
            "PreparationP50": 2,
            "PreparationP95": 2,
            "TotalP50": 20,
            "TotalP95": 20,
        }
    )
    assert await recent_latencies(connection, "hosts") == {}


async def host(connection: Any, name: str, sandboxes: int, taken: int) -> None:
    await connection.execute(
        """insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,
             pids_taken, draining) values (%s, 'i', 'unix:x', 'docker', 1, %s, 1000, 100, 10, %s, 0, false)""",
        (name, sandboxes, taken),
    )


async def test_a_host_is_idle_without_runs_and_sandboxes(connection: Any, pool: Pool) -> None:
    """Executors of one host are one. Red when each is counted, or a host whose sandboxes are used from elsewhere is taken
    for idle."""
    await host(connection, "i-runs", 0, 0)
    await host(connection, "i-sandboxes", 2, 500)
    await host(connection, "i-idle", 0, 0)
    for name, busy in (("i-runs", 1), ("i-runs", 0), ("i-idle", 0), ("i-idle", 0)):
        await beat(connection, uuid.uuid4().hex, busy, name)
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.executors, load.idle, load.slots, load.busy) == (3, 1, 64, 1)
    assert (load.hosts_taken, load.hosts_wanted) == (0.5, 0.0)
    assert await busy_hosts(connection) == {"i-runs", "i-sandboxes"}
    assert (await read_load(connection, "default")).executors == 4


async def test_runs_that_wait_for_room_ask_for_hosts(connection: Any, pool: Pool) -> None:
    """Red when they are left out, since they are not ready."""
    await host(connection, "i-full", 2, 1000)
    await submit(pool, submission("a", new_id()))
    await connection.execute("update runs set gate = 'room'")
    await connection.execute(
        """insert into placements (tenant, user_id, run_id, template, memory, pids, placed_at)
           select tenant, user_id, run_id, 'default', 250, 1, clock_timestamp() - interval '30 s' from runs"""
    )
    load = await read_load(connection, "default", on_hosts=True)
    assert (load.ready, load.hosts_taken, load.hosts_wanted) == (0, 1.0, 0.25)
    assert 30 <= load.room_wait_s < 60


async def test_one_decides_at_a_time_and_the_next_knows_what_it_left(connection: Any) -> None:
    """Red when two calls of the function decide upon the same load, or a decision forgets."""
    assert await take_scaling_turn(connection, "default", 60) == Memory()
    assert await take_scaling_turn(connection, "default", 60) is None
    assert await take_scaling_turn(connection, "hosts", 60) == Memory()
    left = Memory(out_at_s=1.5, low_since_s=2.5, low_peak=3)
    await remember(connection, "default", left)
    await connection.execute("update scaling set due_at = '-infinity'")
    assert await take_scaling_turn(connection, "default", 60) == left


async def test_those_with_least_to_do_retire_and_stay_retired(connection: Any) -> None:
    """They end what they have and become idle. Red when others are chosen the next time, when it is never taken back, or
    when the executor does not hear of it."""
    for name, busy in (("a", 5), ("b", 1), ("c", 9)):
        await beat(connection, name, busy)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"b"}
    await heartbeat(connection, "a", "default", None, slots=16, busy=0, loop_lag_ms=0)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"b"}
    beats = {
        name: await heartbeat(connection, name, "default", None, slots=16, busy=1, loop_lag_ms=0)
        for name in "abc"
    }
    kept, retires = Orders(retiring=False, replaced=False), Orders(retiring=True, replaced=False)
    assert beats == {"a": kept, "b": retires, "c": kept}
    await retire(connection, "default", 0, 60)
    assert await retired(connection) == set()


async def test_nobody_stays_retired_without_a_scaler(connection: Any) -> None:
    """Red when a scaler that died leaves executors that take nothing."""
    await beat(connection, "a", 0)
    await retire(connection, "default", 1, -1)
    orders = await heartbeat(connection, "a", "default", None, slots=16, busy=0, loop_lag_ms=0)
    assert orders == Orders(retiring=False, replaced=False)


async def test_only_executors_of_older_tasks_retire_for_those_that_replace_them(connection: Any) -> None:
    """However much they have to do; and they hear that they are replaced. Red when a new one retires, when an old one waits
    until it is idle, or when that outlasts the replacement."""
    for name, busy, task in (("old-1", 9, "t1"), ("old-2", 5, None), ("new", 0, "t3")):
        await beat(connection, name, busy, task=task)
    await retire(connection, "default", 1, 60, {"t3"})
    assert await retired(connection) == {"old-2"}
    told = await heartbeat(connection, "old-2", "default", None, slots=16, busy=5, loop_lag_ms=0)
    assert told == Orders(retiring=True, replaced=True)
    await beat(connection, "old-2", 5)
    await retire(connection, "default", 3, 60, {"t3"})
    assert await retired(connection) == {"old-1", "old-2"}
    await retire(connection, "default", 2, 60)
    assert await retired(connection) == {"old-1", "old-2"}
    told = await heartbeat(connection, "old-2", "default", None, slots=16, busy=5, loop_lag_ms=0)
    assert told == Orders(retiring=True, replaced=False)


async def test_room_of_those_that_retire_is_nobodys(connection: Any) -> None:
    """Red when it counts as free: a pool that shrinks would look too large all the time until they have gone."""
    for name, busy in (("a", 5), ("b", 1), ("c", 9)):
        await beat(connection, name, busy, f"i-{name}")
    for on_hosts in (False, True):
        await retire(connection, "default", 0, 60)
        assert (await read_load(connection, "default", on_hosts=on_hosts)).free == 33
        await retire(connection, "default", 1, 60)
        assert (await read_load(connection, "default", on_hosts=on_hosts)).free == 18


async def test_a_host_retires_as_a_whole(connection: Any) -> None:
    """Red when an executor of it goes on taking runs: the host would never be idle."""
    for name, busy, host_id in (("a", 0, "i-1"), ("b", 9, "i-1"), ("c", 2, "i-2"), ("d", 2, "i-2")):
        await beat(connection, name, busy, host_id)
    await retire(connection, "default", 1, 60)
    assert await retired(connection) == {"c", "d"}
