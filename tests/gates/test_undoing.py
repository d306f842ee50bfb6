"""What a run wrote at another run's checkpoint is undone with it, whichever version of the executor wrote it."""

import psycopg
import pytest

from sandfleet.shared.db.pool import open_pool
from sandfleet.shared.ids import Owner, RunKey, graph_assistant_id, new_id
from sandfleet.shared.store import runs
from sandfleet.shared.store.api_keys import create_key
from sandfleet.shared.store.claims import claim, end_attempt
from sandfleet.shared.store.submission import Submission, submit

OWNER = Owner("acme", "ann")


class Thread:
    """A thread and its runs. Writes are (run, body) at the one checkpoint that the first run leaves."""

    def __init__(self, pool, connection) -> None:
        self.pool = pool
        self.connection = connection
        self.id = new_id()

    async def run(self):
        """A new run of the thread, claimed."""
        key = RunKey(*OWNER, new_id())
        await submit(
            self.pool,
            Submission(key, self.id, graph_assistant_id("g"), "g", "default", "{}", create_thread=True),
        )
        (run,) = await claim(self.connection, "default", "me", 60.0, 1, longest_waiting=False, poison_limit=5)
        assert run.fence.key == key
        return run.fence

    async def write(self, body, *, task="task", run_id=None):
        """As an executor does; one of an earlier version names no run."""
        names, values, also = "", "", ""
        if run_id is not None:
            names, values, also = ", run_id", ", %(run_id)s", ", run_id = excluded.run_id"
        await self.connection.execute(
            f"""insert into checkpoint_writes (tenant, user_id, thread_id, ns, checkpoint_id, task_id, slot, path, type, body{names})
                values (%(tenant)s, %(user_id)s, %(thread)s, '', 'c', %(task)s, -3, '', 'json', %(body)s{values})
                on conflict (tenant, user_id, thread_id, ns, checkpoint_id, task_id, slot)
                do update set path = excluded.path, type = excluded.type, body = excluded.body{also}""",
            {
                **OWNER._asdict(),
                "thread": str(self.id),
                "task": task,
                "body": body.encode(),
                "run_id": run_id,
            },
        )

    async def checkpoint(self, fence):
        await self.connection.execute(
            """insert into checkpoints (tenant, user_id, thread_id, ns, checkpoint_id, run_id, attempt, metadata, type, body)
               values (%s, %s, %s, '', 'c', %s, 1, '{}', 'json', '{}')""",
            (*OWNER, str(self.id), fence.key.run_id),
        )

    async def end(self, fence, *, rollback=False):
        assert (await end_attempt(self.connection, fence, "interrupted", None, rollback=rollback))[0]

    async def delete(self, fence):
        await runs.delete(self.pool, OWNER, self.id, fence.key.run_id)

    async def writes(self):
        """Bodies by task, and how much is kept of what was replaced."""
        cursor = await self.connection.execute(
            "select task_id, convert_from(body, 'UTF8') from checkpoint_writes where thread_id = %s",
            (str(self.id),),
        )
        found = dict(await cursor.fetchall())
        cursor = await self.connection.execute(
            "select count(*) from replaced_writes where thread_id = %s", (str(self.id),)
        )
        return found, (await cursor.fetchone())[0]


@pytest.fixture
async def thread(database):
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
        open_pool(database, 2) as pool,
    ):
        await connection.execute("truncate api_keys, tenants, runs, threads, flows, vclock cascade")
        await create_key(connection, OWNER, "test")
        yield Thread(pool, connection)


@pytest.mark.parametrize("names_its_run", [True, False], ids=["this version", "an earlier one"])
async def test_a_rollback_gives_back_what_the_run_has_replaced(thread, names_its_run):
    """Red without the triggers: an executor of an earlier version names no run, and replaces what was there for good."""
    first = await thread.run()
    await thread.checkpoint(first)
    await thread.write("question 1", run_id=first.key.run_id if names_its_run else None)
    await thread.end(first)
    second = await thread.run()
    run_id = second.key.run_id if names_its_run else None
    for body in ("question 2", "question 3"):
        await thread.write(body, run_id=run_id)
        await thread.write("output", task="other", run_id=run_id)
    assert await thread.writes() == ({"task": "question 3", "other": "output"}, 1)
    await thread.end(second, rollback=True)
    assert await thread.writes() == ({"task": "question 1"}, 0)


async def test_what_was_written_before_a_run_was_named_comes_back_too(thread):
    """Red when only rows with a run are kept, or when one that comes back is taken for the next run's."""
    first = await thread.run()
    await thread.checkpoint(first)
    await thread.write("question 1")
    await thread.end(first)
    await thread.connection.execute("update checkpoint_writes set run_id = null")
    second = await thread.run()
    await thread.write("question 2", run_id=second.key.run_id)
    key = RunKey(*OWNER, new_id())
    await submit(thread.pool, Submission(key, thread.id, graph_assistant_id("g"), "g", "default", "{}"))
    await thread.end(second, rollback=True)
    (third,) = await claim(thread.connection, "default", "me", 60.0, 1, longest_waiting=False, poison_limit=5)
    await thread.end(third.fence, rollback=True)
    assert await thread.writes() == ({"task": "question 1"}, 0)


async def test_runs_that_are_deleted_in_any_order_leave_what_was_before_them(thread):
    """Red when what a deleted run had replaced goes with it: the run after it would give its rows back."""
    first = await thread.run()
    await thread.checkpoint(first)
    await thread.write("question 1", run_id=first.key.run_id)
    await thread.end(first)
    later = []
    for number in (2, 3, 4):
        fence = await thread.run()
        await thread.write(f"question {number}", run_id=fence.key.run_id)
        await thread.end(fence)
        later.append(fence)
    second, third, fourth = later
    await thread.delete(third)
    assert await thread.writes() == ({"task": "question 4"}, 2)
    await thread.delete(fourth)
    assert await thread.writes() == ({"task": "question 2"}, 1)
    await thread.delete(second)
    assert await thread.writes() == ({"task": "question 1"}, 0)
    await thread.delete(first)
    assert await thread.writes() == ({}, 0)
