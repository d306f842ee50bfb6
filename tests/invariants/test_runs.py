"""Each rule within PostgreSQL: nothing to say of a healthy database, and exactly the seeded violation of a broken one."""

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.invariants import runs as invariants
from sandfleet.shared.invariants.runs import check_runs
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import Ending, claim, finish
from sandfleet.shared.store.submission import Submission, submit

TENANT = "t"


async def accept(pool, thread, **given):
    submission = Submission(
        RunKey(TENANT, "u", new_id()),
        thread,
        graph_assistant_id("g"),
        "g",
        "default",
        "{}",
        create_thread=True,
        **given,
    )
    return (await submit(pool, submission)).run_id


@pytest.fixture
async def runs(database):
    """A database with a run in every state, by name, and a connection to it. The tenant is at its cap of 4."""
    pool = open_pool(database, 2)
    await pool.open()
    connection = await psycopg.AsyncConnection.connect(database, autocommit=True)
    await connection.execute(
        "truncate runs, threads, journal, tool_calls, executors, hosts, placements, sandboxes, api_keys, tenants, flows, vclock cascade"
    )
    await create_key(connection, Owner(TENANT, "u"), "test")
    ids = {}
    for name in ("ended", "cancelled"):
        ids[name] = await accept(pool, new_id())
    for run in await claim(connection, "default", "x", 60, 1, longest_waiting=False):
        events = '[[0, "metadata", "{}"], [1, "values", "{}"], [7, "end", "null"]]'
        await finish(connection, run.fence, Ending("success", events))
    await request_cancel(pool, RunKey(TENANT, "u", ids["cancelled"]), "interrupt")
    await connection.execute("update tenants set max_in_flight = 4")
    thread = new_id()
    ids["running"] = await accept(pool, thread)
    assert len(await claim(connection, "default", "x", 60, 1, longest_waiting=False)) == 1
    ids["thread"] = await accept(pool, thread)
    ids["time"] = await accept(pool, new_id(), delay_s=60)
    for n in range(3):
        ids[f"ready{n}"] = await accept(pool, new_id())
    ids["tenant"] = await accept(pool, new_id())
    yield connection, ids
    await connection.close()
    await pool.close()


async def test_a_healthy_database_breaks_no_rule(runs):
    """Red when a rule takes a legal state for a violation."""
    connection, _ = runs
    checked = await check_runs(connection)
    assert checked.violations == []
    assert (checked.live, checked.ended, checked.ready) == (7, 2, {"default": 3})


OF = "where run_id = %(run)s"
THREAD_OF = "where thread_id = (select thread_id from runs where run_id = %(run)s)"
SEEDS = [
    ("running run without a live lease", "running", f"update runs set lease_owner = null {OF}"),
    (
        "running run without a live lease",
        "running",
        f"update runs set lease_expires_at = null {OF}",
    ),
    (
        "pending run with a lease",
        "ready0",
        f"update runs set lease_owner = 'x' {OF}",
    ),
    (
        "pending run with a lease",
        "ready0",
        f"update runs set lease_expires_at = clock_timestamp() {OF}",
    ),
    ("gate without a reason", "time", f"update runs set not_before = not_before - interval '121 s' {OF}"),
    ("gate without a reason", "time", f"update runs set not_before = null {OF}"),
    (
        "gate without a reason",
        "thread",
        f"update threads set active_run = (select run_id from runs where gate = 'thread') {THREAD_OF};"
        f" update runs set status = 'success', finished_at = clock_timestamp(), lease_owner = null, lease_expires_at = null"
        " where status = 'running'; delete from runs where status = 'success'; update tenants set slots = slots - 1",
    ),
    ("gate without a reason", "tenant", "update tenants set max_in_flight = 5"),
    ("gate without a reason", "tenant", f"update threads set active_run = null {THREAD_OF}"),
    (
        "gate without a reason",
        "ready1",
        f"update runs set gate = 'children' {OF};"
        " update tenants set slots = slots - 1, waiting = waiting + 1; update runs set gate = 'children' where gate = 'tenant'",
    ),
    ("gate without a reason", "running", f"update runs set gate = 'time' {OF}"),
    ("ready run out of order", "ready2", f"update runs set vtime = null {OF}"),
    ("ready run out of order", "ready2", f"update runs set ready_at = null {OF}"),
    ("live run without its thread", "ready0", f"update threads set status = 'idle' {THREAD_OF}"),
    ("live run without its thread", "running", f"update threads set active_run = null {THREAD_OF}"),
    ("live run without its thread", "ready1", f"delete from threads {THREAD_OF}"),
    ("tenant's counters", TENANT, "update tenants set slots = slots - 1"),
    ("tenant's counters", TENANT, "update tenants set waiting = waiting + 1"),
    ("ended run with a lease", "ended", f"update runs set lease_owner = 'x' {OF}"),
    ("ended run with a lease", "ended", f"update runs set lease_expires_at = clock_timestamp() {OF}"),
    ("ended run with a lease", "cancelled", f"update runs set gate = 'thread' {OF}"),
    (
        "ended run with an open tool call",
        "ended",
        "insert into tool_calls (tenant, user_id, run_id, call_id, execution, ns, name, attempt, status)"
        f" select tenant, user_id, run_id, run_id, 0, '', 'rm', 1, 'started' from runs {OF}",
    ),
    (
        "usage of an attempt that there never was",
        "ended",
        f"insert into run_usage select tenant, user_id, run_id, attempt + 1, 'm', current_date, 1, 0, 0, 1, 1, 0, 0, 0 from runs {OF}",
    ),
    ("ended run that holds its thread", "ended", f"update threads set active_run = %(run)s {THREAD_OF}"),
    (
        "busy thread without a live run",
        "thread of cancelled",
        f"update threads set status = 'busy' {THREAD_OF}",
    ),
    ("journal of an ended run", "ended", f"delete from journal {OF} and event = 'end'"),
    ("journal of an ended run", "ended", f"delete from journal {OF} and seq = 0"),
    ("journal of an ended run", "ended", f"delete from journal {OF}"),
    ("journal of an ended run", "ended", f"update journal set seq = seq + 10 {OF} and event = 'values'"),
    ("journal of an ended run", "ended", f"update journal set event = 'end' {OF} and event = 'values'"),
    (
        "journal of an ended run",
        "ended",
        f"update runs set attempt = attempt + 1 {OF}",
    ),
    (
        "gate without a reason",
        "tenant",
        f"update runs set gate = 'room' {OF}",
    ),
    (
        "gate without a reason",
        "tenant",
        f"update runs set gate = 'room' {OF}; update threads set active_run = null {THREAD_OF};"
        " insert into placements (tenant, user_id, run_id, template, memory, pids)"
        f" select tenant, user_id, run_id, 'default', 1, 1 from runs {OF}",
    ),
    (
        "placement of a run that is over",
        "ended",
        "insert into placements (tenant, user_id, run_id, host_id, template, memory, pids)"
        f" select tenant, user_id, run_id, 'h', 'default', 1, 1 from runs {OF}",
    ),
    (
        "run that waits beside room",
        "tenant",
        f"update runs set gate = 'room' {OF};"
        " insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,"
        " pids_taken, draining) values ('h', 'i', '', 'docker', 1, 0, 1, 1, 1, 0, 0, false);"
        " update hosts set heartbeat_at = heartbeat_at + interval '1 h'; insert into placements (tenant, user_id, run_id, template, memory, pids, placed_at)"
        " select tenant, user_id, run_id, 'default', 1, 1, clock_timestamp() - interval '61 s' from runs"
        f" {OF}",
    ),
    (
        "sandbox of a run that is over",
        "ended",
        f"update runs set finished_at = clock_timestamp() - interval '61 s' {OF};"
        " insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,"
        " pids_taken, draining, held) select 'h', 'i', '', 'docker', 1, 0, 1, 1, 1, 0, 0, false,"
        f" jsonb_build_array(jsonb_build_array(tenant, user_id, run_id)) from runs {OF}",
    ),
    (
        "sandbox beyond its time",
        "00000000-0000-7000-8000-000000000001",
        "insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, expires_at) values ('a', 'u',"
        " '00000000-0000-7000-8000-000000000001', 'default', '{}', clock_timestamp() - interval '61 s')",
    ),
    (
        "executor that is gone",
        "e",
        "insert into executors (executor_id, pool, slots, busy, heartbeat_at)"
        " values ('e', 'default', 1, 0, clock_timestamp() - interval '6 minutes 1 s')",
    ),
    (
        "sandbox host that is gone",
        "h",
        "insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,"
        " pids_taken, draining, heartbeat_at) values ('h', 'i', '', 'docker', 1, 0, 1, 1, 1, 0, 0, false, clock_timestamp() - interval '6 minutes 1 s')",
    ),
]


@pytest.mark.parametrize(("rule", "name", "seed"), SEEDS)
async def test_a_seeded_violation_is_found_and_named(runs, rule, name, seed):
    """Red when the rule is taken out, or when it names something else than what breaks it."""
    connection, ids = runs
    run = ids.get(name.removeprefix("thread of "))
    for statement in seed.split(";"):
        await connection.execute(statement, {"run": run})
    expected = str(run or name)
    if name.startswith("thread of "):
        cursor = await connection.execute("select thread_id from runs where run_id = %s", (run,))
        expected = str((await cursor.fetchone())[0])
    found = (await check_runs(connection)).violations
    assert {(v.rule, v.id) for v in found} >= {(rule, expected)}
    assert (await check_runs(connection, newest=None)).violations == found
    await connection.execute("update runs set kwargs = '{}'")  # nothing is locked or left open


async def test_a_run_that_is_over_and_does_not_say_since_when_is_found_among_all(runs):
    """The newest are those with a time. Red when only a lease or a gate counts as left behind."""
    connection, ids = runs
    await connection.execute(f"update runs set finished_at = null {OF}", {"run": ids["ended"]})
    (found,) = (await check_runs(connection, newest=None)).violations
    assert (found.rule, found.id) == ("ended run with a lease", str(ids["ended"]))


async def test_room_that_has_just_come_is_no_violation(runs, monkeypatch):
    """Whoever waits for it gets it by the next sweep. Red when the rule looks once."""
    connection, ids = runs
    (seed,) = [seed for rule, _, seed in SEEDS if rule == "run that waits beside room"]
    for statement in seed.split(";"):
        await connection.execute(statement, {"run": ids["tenant"]})
    broken, looks = invariants._broken, 0

    async def taken_between(connection, rule, *given):
        nonlocal looks
        if rule == "run that waits beside room":
            looks += 1
            if looks == 2:
                await connection.execute("update hosts set draining = true")
        return await broken(connection, rule, *given)

    monkeypatch.setattr(invariants, "_LOOK_AGAIN_S", 0)
    monkeypatch.setattr(invariants, "_broken", taken_between)
    assert (await check_runs(connection)).violations == []
    assert looks == 2


async def test_a_silent_host_that_may_have_left_sandboxes_is_kept_for_a_day(runs):
    """Another host of its machine clears its folder first. Red when it is named as soon as one without a folder."""
    connection, _ = runs
    await connection.execute(
        """insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,
             pids_taken, draining, machine, folder, heartbeat_at)
           select age, 'i', '', 'docker', 1, 0, 1, 1, 1, 0, 0, false, 'm', '/' || age, clock_timestamp() - age::interval
           from unnest(array['23 hours', '25 hours']) age"""
    )
    (found,) = (await check_runs(connection)).violations
    assert (found.rule, found.id) == ("sandbox host that is gone", "25 hours")


async def test_a_host_has_a_minute_to_remove_the_sandbox_of_a_run_that_is_over(runs):
    """What it had at its last beat counts, however long that is ago. Red when the clock of now counts."""
    connection, ids = runs
    await connection.execute(
        """insert into hosts (host_id, instance, address, backend, room, sandboxes, memory, pids, most, memory_taken,
             pids_taken, draining, machine, folder, held, heartbeat_at)
           select 'h', 'i', '', 'docker', 1, 1, 1, 1, 1, 0, 0, false, 'm', '/h',
             jsonb_build_array(jsonb_build_array(tenant, user_id, run_id)), clock_timestamp() - interval '1 hour'
           from runs where run_id = %(run)s""",
        {"run": ids["ended"]},
    )
    await connection.execute(
        f"update runs set finished_at = clock_timestamp() - interval '61 minutes' + interval '1 s' {OF}",
        {"run": ids["ended"]},
    )
    assert (await check_runs(connection)).violations == []


async def test_a_sandbox_without_a_run_owns_its_place(runs):
    """Red when the rule knows only runs."""
    connection, _ = runs
    await connection.execute(
        """insert into sandboxes (tenant, user_id, sandbox_id, template, metadata, expires_at)
           values ('a', 'u', gen_random_uuid(), 'default', '{}', clock_timestamp() - interval '1 s')"""
    )
    await connection.execute(
        """insert into placements (tenant, user_id, run_id, host_id, template, memory, pids)
           select tenant, user_id, sandbox_id, 'h', template, 1, 1 from sandboxes"""
    )
    assert (await check_runs(connection)).violations == []


async def test_an_expired_lease_is_no_violation_until_the_sweep_had_its_time(runs, monkeypatch):
    """Red when the rule forgets the sweep's time, or looks at no expired lease at all."""
    connection, ids = runs
    await connection.execute(
        "update runs set lease_expires_at = pg_postmaster_start_time() where run_id = %s", (ids["running"],)
    )
    monkeypatch.setattr("sandfleet.shared.invariants.runs.GONE_S", 3600.0)
    assert (await check_runs(connection)).violations == []
    monkeypatch.setattr("sandfleet.shared.invariants.runs.GONE_S", 0.0)
    (found,) = (await check_runs(connection)).violations
    assert (found.rule, found.id) == ("running run without a live lease", str(ids["running"]))
