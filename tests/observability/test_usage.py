"""Accounts of usage, on processes that die."""

import psycopg
import pytest

from tests.observability.conftest import scrape
from tests.observability.test_traces import asking, execute
from tests.waiting import eventually

USAGE = """select attempt, calls, unmetered_calls, unpriced_calls, input_tokens > 0 and output_tokens > 0,
  abs(cost_usd - (1000 * input_tokens + 2000 * output_tokens) / 1e6) < 1e-9 from run_usage where run_id = %s order by attempt"""


async def accounts(connection, run_id):
    return await (await connection.execute(USAGE, (run_id,))).fetchall()


@pytest.mark.long
async def test_what_an_attempt_used_before_it_was_killed_counts_with_its_successors(stack, client):
    """Killed by SIGKILL in its second model call. Red when the first call's account waits for the run's end, or gives way to
    the successor's."""
    thread = await client.threads.create()
    hangs_once = {"text": "done", "faults": [{"hang": True, "times": 1}]}
    run = await client.runs.create(thread["thread_id"], "agent", input=asking(execute("true"), hangs_once))

    async def in_second_call():
        values = (await client.threads.get_state(thread["thread_id"]))["values"] or {}
        said = [message["type"] for message in values.get("messages", [])]
        return said[-1:] == ["tool"] and (await scrape(stack, "executor-1"))(
            "sandfleet_model_calls_in_flight"
        )

    await eventually(in_second_call, 120, "the second call")
    await stack.kill("executor-1")
    await stack.restart("executor-1")
    await client.runs.join(thread["thread_id"], run["run_id"])
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
        assert await accounts(connection, run["run_id"]) == [(n, 1, 0, 0, True, True) for n in (1, 2)]
    usage = (await client.http.get(f"/runs/{run['run_id']}/timing"))["usage"]
    assert (usage["calls"], list(usage["models"])) == (2, ["scripted"])
    assert usage["cost_usd"] > 0
