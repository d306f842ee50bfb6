"""The gates in PostgreSQL, driven by random schedules and held against the pure state machine."""

import asyncio
import json
import uuid

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.errors import Conflict, NotFound
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.run_state import RunState, Status, reachable
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.cancellation import request_cancel
from sandfleet.shared.store.claims import Ending, Renewal, claim, finish, hand_over, renew
from sandfleet.shared.store.submission import Submission, submit
from sandfleet.shared.store.suspects import deaths_of_a_suspect, deaths_that_end
from sandfleet.shared.store.sweep import sweep

TENANTS = ("a", "b")
CAP = 3
OUTCOMES = ("success", "error", "timeout", "interrupted")


def submission(tenant: str, thread: uuid.UUID, **given) -> Submission:
    return Submission(
        RunKey(tenant, "u", new_id()),
        thread,
        graph_assistant_id("g"),
        "g",
        "default",
        "{}",
        create_thread=True,
        **given,
    )


def ending(status: str) -> Ending:
    return Ending(
        status, json.dumps([[1, "end", "null"]]), thread_status="error" if status == "error" else "idle"
    )


class Gates(RuleBasedStateMachine):
    """Submits, claims, finishes, kills, hands over, cancels and sweeps at random, in one database."""

    database = ""
    runner: asyncio.Runner

    @initialize()
    def empty(self):
        async def make():
            self.connection = await psycopg.AsyncConnection.connect(self.database, autocommit=True)
            for table in ("runs", "threads", "journal", "api_keys", "tenants", "flows", "vclock"):
                await self.connection.execute(f"truncate {table} cascade")
            self.pool = open_pool(self.database, 2)
            await self.pool.open()
            for tenant in TENANTS:
                await create_key(self.connection, Owner(tenant, "u"), "test")
            await self.connection.execute("update tenants set max_in_flight = %s", (CAP,))

        self.runner = asyncio.Runner()
        self.runner.run(make())
        self.threads = {tenant: [new_id() for _ in range(3)] for tenant in TENANTS}
        self.held = []
        self.zombies = []
        self.known = {}
        self.accepted = set()

    def teardown(self):
        async def close():
            await self.pool.close()
            await self.connection.close()

        if hasattr(self, "pool"):
            self.runner.run(close())
        if hasattr(self, "runner"):
            self.runner.close()

    @rule(
        tenant=st.sampled_from(TENANTS),
        thread=st.integers(0, 2),
        strategy=st.sampled_from(["enqueue", "reject", "interrupt"]),
        delayed=st.booleans(),
        run_class=st.integers(0, 2),
    )
    def submit(self, tenant, thread, strategy, delayed, run_class):
        given = submission(
            tenant,
            self.threads[tenant][thread],
            strategy=strategy,
            delay_s=0.000001 if delayed else 0,
            run_class=run_class,
        )
        try:
            self.accepted.add(self.runner.run(submit(self.pool, given)).run_id)
        except Conflict:
            assert strategy == "reject"

    @rule(limit=st.integers(1, 4), longest=st.booleans())
    def claim(self, limit, longest):
        runs = self.runner.run(claim(self.connection, "default", "x", 60, limit, longest_waiting=longest))
        assert len(runs) <= (1 if longest else limit)
        self.held += [run.fence for run in runs]

    @rule(which=st.integers(0, 50), status=st.sampled_from(OUTCOMES))
    def finish(self, which, status):
        if self.held:
            fence = self.held.pop(which % len(self.held))
            mine, _ = self.runner.run(finish(self.connection, fence, ending(status)))
            assert mine or self.row(fence.key.run_id)[2] > fence.attempt
            again, ready = self.runner.run(finish(self.connection, fence, ending(status)))
            assert again == mine
            assert ready == {}

    @rule(which=st.integers(0, 50))
    def die(self, which):
        """An executor dies, or is frozen: its lease expires, and it may come back as a zombie."""
        if self.held:
            fence = self.held.pop(which % len(self.held))
            self.zombies.append(fence)
            self.runner.run(self.expire(fence.key.run_id))

    async def expire(self, run_id):
        await self.connection.execute(
            "update runs set lease_expires_at = clock_timestamp() - interval '1 s' where run_id = %s and status = 'running'",
            (run_id,),
        )

    @rule()
    def sweep(self):
        self.runner.run(sweep(self.connection, 4, 0, 3600))

    @rule(which=st.integers(0, 50))
    def hand_over(self, which):
        if self.held:
            fence = self.held.pop(which % len(self.held))
            self.runner.run(hand_over(self.connection, [fence]))
            self.zombies.append(fence)

    @rule(which=st.integers(0, 50), action=st.sampled_from(["interrupt"]))
    def cancel(self, which, action):
        if self.accepted:
            run_id = sorted(self.accepted)[which % len(self.accepted)]
            tenant = self.row(run_id)[3]
            try:
                self.runner.run(request_cancel(self.pool, RunKey(tenant, "u", run_id), action))
            except NotFound:
                assert Status(self.row(run_id)[0]) in {"success", "error", "timeout", "interrupted"}

    @rule(which=st.integers(0, 50))
    def zombie_writes(self, which):
        """A superseded executor renews and finishes: nothing of it counts."""
        if self.zombies:
            fence = self.zombies[which % len(self.zombies)]
            status, _, attempt, _ = self.row(fence.key.run_id)
            if status == "running" and attempt == fence.attempt:
                return  # its lease was not swept yet: it is no zombie
            before = self.row(fence.key.run_id)
            assert self.runner.run(renew(self.connection, [fence], 60)) == Renewal({}, set())
            self.runner.run(finish(self.connection, fence, ending("success")))
            assert self.row(fence.key.run_id) == before

    def row(self, run_id):
        async def read():
            cursor = await self.connection.execute(
                "select status, gate, attempt, tenant from runs where run_id = %s", (run_id,)
            )
            return await cursor.fetchone()

        return self.runner.run(read())

    @invariant()
    def holds(self):
        if hasattr(self, "connection"):
            self.runner.run(self.check())

    async def check(self):
        async def rows(query):
            return await (await self.connection.execute(query)).fetchall()

        for tenant, slots, waiting in await rows("select tenant, slots, waiting from tenants"):
            counted = await rows(
                "select count(*) filter (where status = 'running' or status = 'pending' and gate is null),"
                f" count(*) filter (where gate is not null) from runs where tenant = '{tenant}'"
            )
            assert (slots, waiting) == counted[0], f"counters of {tenant}"
            assert slots <= CAP
        assert not await rows(
            "select thread_id from runs where status = 'running' or status = 'pending' and (gate is null or gate = 'tenant')"
            " group by tenant, user_id, thread_id having count(*) > 1"
        ), "one run at a time on a thread"
        assert not await rows(
            "select 1 from threads t where active_run is not null and not exists (select 1 from runs r"
            " where r.run_id = t.active_run and r.status in ('pending', 'running'))"
        ), "no thread is held by a run that is over"
        assert not await rows(
            "select 1 from threads t where (status = 'busy') <> exists (select 1 from runs r where r.thread_id = t.thread_id"
            " and r.status in ('pending', 'running'))"
        ), "a thread is busy exactly while a run of it is not over"
        assert not await rows(
            "select 1 from runs r where gate = 'tenant' and (select slots < max_in_flight from tenants t where t.tenant = r.tenant)"
        ), "no run waits for a slot that is free"
        assert not await rows(
            "select 1 from runs r where gate = 'thread' and (select active_run is null from threads t where t.thread_id = r.thread_id)"
            " and not exists (select 1 from runs o where o.gate = 'time')"
        ), "no run waits for a thread that is free"
        for run_id, status, gate, attempt in await rows("select run_id, status, gate, attempt from runs"):
            state = RunState(Status(status), gate, attempt)
            assert run_id not in self.known or reachable(self.known[run_id], state), (
                self.known[run_id],
                state,
            )
            self.known[run_id] = state
        assert self.accepted <= set(self.known), "nothing accepted is lost"


def test_the_gates_hold_under_random_schedules(database):
    """Red when `end_run` keeps the attempt, or `submit_run` lets a second run have a taken thread."""

    class Here(Gates):
        pass

    Here.database = database
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.fixture
async def pool(database):
    pool = open_pool(database, 8)
    await pool.open()
    async with pool.connection() as connection:
        await connection.execute(
            "truncate runs, threads, journal, api_keys, tenants, flows, vclock, idempotency_keys cascade"
        )
        for tenant in ("flood", "other"):
            await create_key(connection, Owner(tenant, "u"), "test")
    yield pool
    await pool.close()


async def claim_order(pool, count, *, guard=False):
    """Claim and finish one run after another; returns (tenant, class) in the order of the claims."""
    order = []
    async with pool.connection() as connection:
        for n in range(count):
            (run,) = await claim(connection, "default", "x", 60, 1, longest_waiting=guard and n % 8 == 7)
            await connection.execute(
                "update vclock set v = %s where class = %s and v < %s", (run.vtime, run.run_class, run.vtime)
            )
            order.append((run.fence.key.tenant, run.run_class))
            await finish(connection, run.fence, ending("success"))
    return order


async def test_one_run_of_a_quiet_tenant_does_not_wait_for_a_flood(pool):
    """Red when runs are claimed in order of arrival: the single run would come last of 201."""
    for _ in range(200):
        await submit(pool, submission("flood", new_id()))
    await submit(pool, submission("other", new_id()))
    order = await claim_order(pool, 5)
    assert ("other", 1) in order


async def test_weights_share_the_claims(pool):
    """Red when `make_ready` ignores the weight: the claims would be shared evenly."""
    async with pool.connection() as connection:
        await connection.execute("update tenants set weight = 3 where tenant = 'other'")
    for _ in range(40):
        await submit(pool, submission("flood", new_id()))
        await submit(pool, submission("other", new_id()))
    order = await claim_order(pool, 40)
    assert 28 <= sum(1 for tenant, _ in order if tenant == "other") <= 32


async def test_interactive_runs_do_not_starve_a_batch_run(pool):
    """Red when the claim never takes the class that has waited longest."""
    await submit(pool, submission("other", new_id(), run_class=2))
    for _ in range(30):
        await submit(pool, submission("flood", new_id(), run_class=0))
    assert ("other", 2) in await claim_order(pool, 9, guard=True)


async def test_whoever_ends_frees_a_slot_and_a_thread_for_those_that_wait(pool):
    """In the same transaction, and says for whom to wake an executor. Red when `close_run` forgets to pass them on: the
    sweep would find the slot, nobody the thread."""
    async with pool.connection() as connection:
        await connection.execute("update tenants set max_in_flight = 1 where tenant = 'other'")
        thread = new_id()
        for on in (thread, thread, new_id()):
            await submit(pool, submission("other", on))
        for ready in ({"default": 1}, {"default": 1}, {}):
            (run,) = await claim(connection, "default", "x", 60, 5, longest_waiting=False)
            assert (await finish(connection, run.fence, ending("success")))[1] == ready


async def test_runs_of_a_thread_go_in_the_order_of_their_creation(pool):
    """Red when `pass_on` takes any waiting run instead of the oldest."""
    thread = new_id()
    created = [(await submit(pool, submission("other", thread))).run_id for _ in range(5)]
    claimed = []
    async with pool.connection() as connection:
        for _ in created:
            (run,) = await claim(connection, "default", "x", 60, 5, longest_waiting=False)
            claimed.append(run.fence.key.run_id)
            await finish(connection, run.fence, ending("success"))
    assert claimed == created


async def test_concurrent_claims_never_share_a_run(pool):
    """Red when the claim does not lock the rows that it takes."""
    for _ in range(60):
        await submit(pool, submission("flood", new_id()))

    async def worker():
        async with pool.connection() as connection:
            return await claim(connection, "default", "x", 60, 10, longest_waiting=False)

    batches = await asyncio.gather(*(worker() for _ in range(8)))
    ids = [run.fence.key.run_id for batch in batches for run in batch]
    assert len(ids) == len(set(ids)) == 60


async def test_an_idempotency_key_makes_one_run_however_many_ask(pool):
    """Red when the key is looked up before the tenant's row is locked."""
    thread = new_id()
    answers = await asyncio.gather(
        *(submit(pool, submission("other", thread, idempotency_key="k", request_hash=b"1")) for _ in range(8))
    )
    assert len({answer.run_id for answer in answers}) == 1
    assert sum(not answer.replayed for answer in answers) == 1
    with pytest.raises(Conflict):
        await submit(pool, submission("other", thread, idempotency_key="k", request_hash=b"2"))


async def test_a_superseded_attempt_ends_nothing(pool):
    """Red when `finish_run` does not compare the attempt: a frozen executor would end the run under its successor."""
    accepted = await submit(pool, submission("other", new_id()))
    async with pool.connection() as connection:
        (frozen,) = await claim(connection, "default", "x", -1, 1, longest_waiting=False)
        await sweep(connection, 5, 0, 3600)
        (successor,) = await claim(connection, "default", "y", 60, 1, longest_waiting=False)
        assert await finish(connection, frozen.fence, ending("success")) == (False, {})
        cursor = await connection.execute(
            "select status, attempt from runs where run_id = %s", (accepted.run_id,)
        )
        assert await cursor.fetchone() == ("running", successor.fence.attempt)


async def test_executors_that_die_again_and_again_end_the_run(pool):
    """Red when the sweep does not count deaths: a graph that kills its process would be run for ever."""
    accepted = await submit(pool, submission("other", new_id()))
    async with pool.connection() as connection:
        for deaths in range(deaths_that_end(3)):
            suspects = deaths >= deaths_of_a_suspect(3)
            await claim(
                connection, "default", "x", -1, 1, longest_waiting=False, poison_limit=3, suspects=suspects
            )
            await sweep(connection, 3, 0, 3600)
        cursor = await connection.execute(
            "select status, error->>'error' from runs where run_id = %s", (accepted.run_id,)
        )
        assert await cursor.fetchone() == ("error", "ExecutorLost")
        cursor = await connection.execute("select status from threads")
        assert await cursor.fetchone() == ("error",)


async def test_leases_outlive_a_restart_of_the_database(pool):
    """Red when the sweep ignores the server's start time: nobody could renew while it was away."""
    await submit(pool, submission("other", new_id()))
    async with pool.connection() as connection:
        await claim(connection, "default", "x", -1, 1, longest_waiting=False)
        # It has answered without a pause for ever, as far as the sweeps have seen.
        await connection.execute(
            "insert into pulse (beat_at, steady_since) values (clock_timestamp(), '-infinity')"
            " on conflict (one) do update set beat_at = excluded.beat_at, steady_since = excluded.steady_since"
        )
        assert await sweep(connection, 5, 10**6, 3600) == {}
        assert await sweep(connection, 5, 0, 3600) == {"default": 1}
