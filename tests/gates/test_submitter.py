"""Runs that are submitted together: what they share, and what each has for itself."""

import asyncio
from dataclasses import replace

import psycopg
import pytest

from sandfleet.shared.errors import Conflict, NotFound
from sandfleet.shared.ids import new_id
from sandfleet.shared.store.submission import Accepted, Submitter, submit_together
from tests.gates.test_finisher import waiting
from tests.gates.test_gates import pool, submission
from tests.waiting import eventually

__all__ = ["pool"]


LARGE = '{"a": "' + "x" * 100_000 + '"}'


async def together(pool, submissions, transactions=1):
    """What `Submitter.submit` gives or raises for each, all of them asked for while the tenant's row is locked."""
    submitter = Submitter(pool)
    async with pool.connection() as blocker, blocker.transaction():
        await blocker.execute("select 1 from tenants where tenant = 'other' for update")
        asked = [asyncio.ensure_future(submitter.submit(each)) for each in submissions]
        await eventually(lambda: waiting(pool, transactions))
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_runs_that_are_submitted_together_share_a_transaction(pool):
    """Red when each is submitted on its own: ten transactions, one after another, for the same row."""
    submissions = [submission("other", new_id()) for _ in range(10)]
    answers = await together(pool, submissions)
    assert [answer.run_id for answer in answers] == [each.key.run_id for each in submissions]
    async with pool.connection() as connection:
        cursor = await connection.execute("select count(*), count(distinct xmin::text) from runs")
        total, transactions = await cursor.fetchone()
    assert total == 10
    assert transactions <= 2


async def test_a_run_that_is_refused_keeps_no_other_from_being_accepted(pool):
    """Red when a refusal or a value that PostgreSQL cannot hold fails the transaction of all."""
    busy = new_id()
    answers = await together(
        pool,
        [
            submission("other", busy),
            submission("other", busy, strategy="reject"),
            submission("other", new_id(), metadata='{"a": "\\u0000"}'),
            submission("other", new_id()),
        ],
    )
    assert [type(answer) for answer in answers] == [
        Accepted,
        Conflict,
        psycopg.errors.UntranslatableCharacter,
        Accepted,
    ]


async def test_refusals_do_not_end_the_transaction_of_the_others(pool):
    """Red when a refusal is raised while the answers of the others are still to be given."""
    given = submission("other", new_id())
    missing = replace(submission("other", new_id()), create_thread=False)
    answers = await together(pool, [missing, given])
    assert isinstance(answers[0], NotFound)
    assert answers[1].run_id == given.key.run_id


async def test_an_idempotency_key_makes_one_run_also_within_one_transaction(pool):
    """Red when the second does not see what the first has written in the same statement."""
    thread = new_id()
    keyed = [submission("other", thread, idempotency_key="k", request_hash=b"\x00\x01") for _ in range(6)]
    other = submission("other", thread, idempotency_key="k", request_hash=b"\x02")
    async with pool.connection() as connection:
        *same, reused = await submit_together(connection, [*keyed, other])
    assert len({answer.run_id for answer in same}) == 1
    assert [answer.replayed for answer in same] == [False] + [True] * 5
    assert isinstance(reused, Conflict)


@pytest.mark.parametrize("alone", [{"strategy": "interrupt"}, {"strategy": "rollback"}, {"kwargs": LARGE}])
async def test_what_locks_or_weighs_much_goes_alone(pool, alone):
    """Red when a run that stops others, and locks them in any order, or a large body shares a transaction."""
    special = replace(submission("other", new_id()), **alone)
    submissions = [submission("other", new_id()), special, submission("other", new_id())]
    answers = await together(pool, submissions, transactions=2)
    assert [answer.run_id for answer in answers] == [each.key.run_id for each in submissions]


async def test_parameters_survive_exactly(pool):
    """Red when they lose an escape on their way into the JSON of a group, or out of it."""
    texts = [LARGE, '{"a": "\\u0000 \\\\ \\"", "b": "\u2028\U0001f600"}', "{}"]
    submissions = [replace(submission("other", new_id()), kwargs=text) for text in texts]
    async with pool.connection() as connection:
        answers = await submit_together(connection, submissions)
        for answer, text in zip(answers, texts, strict=True):
            cursor = await connection.execute(
                "select kwargs::text from runs where run_id = %s", (answer.run_id,)
            )
            assert await cursor.fetchone() == (text,)
