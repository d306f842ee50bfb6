"""What executors and the gateway count, read as Prometheus reads it."""

import asyncio
from uuid import uuid4

import psycopg
import pytest
from langgraph_sdk import get_client

from sandfleet.shared.ids import Owner
from sandfleet.shared.store.api_keys import create_key
from tests.observability.conftest import scrape
from tests.observability.test_traces import asking, execute
from tests.waiting import eventually


async def grown(stack, before, name, by=1, process="executor-1", **labels):
    """Wait until a counter has grown by that much since ``before``; returns the samples of that moment."""

    async def look():
        now = await scrape(stack, process)
        return now if now(name, **labels) - before(name, **labels) >= by else None

    return await eventually(look, what=f"{name} {labels}")


async def test_a_run_is_counted_with_its_latencies_one_by_one(stack, client):
    """Red when one of dispatch, preparation, first output and total is missing or counted twice."""
    before = await scrape(stack, "executor-1")
    await client.runs.wait(None, "agent", input=asking({"text": "hello"}))
    after = await grown(stack, before, "sandfleet_runs_ended_total", graph="agent", status="success")
    for latency in ("dispatch", "preparation", "first_output", "total"):
        name = f"sandfleet_run_{latency}_seconds"
        assert after(f"{name}_count", graph="agent") - before(f"{name}_count", graph="agent") == 1, latency
    sums = {
        latency: after(f"sandfleet_run_{latency}_seconds_sum", graph="agent")
        - before(f"sandfleet_run_{latency}_seconds_sum", graph="agent")
        for latency in ("dispatch", "preparation", "first_output", "total")
    }
    assert 0 < sums["dispatch"] + sums["preparation"] <= sums["first_output"] <= sums["total"]
    assert after("sandfleet_slots", pool="default") == 64


async def test_tokens_and_their_cost_are_counted_for_the_tenant(stack, client):
    """Red when usage is not read, counted for another tenant, or priced wrongly."""
    before = await scrape(stack, "executor-1")
    await client.runs.wait(None, "agent", input=asking({"text": "hello"}))
    after = await grown(stack, before, "sandfleet_cost_usd_total", by=1e-9, tenant="local")
    used = {
        kind: after("sandfleet_tokens_total", tenant="local", kind=kind)
        - before("sandfleet_tokens_total", tenant="local", kind=kind)
        for kind in ("input", "output")
    }
    assert used["input"] > 0
    assert used["output"] > 0
    cost = after("sandfleet_cost_usd_total", tenant="local") - before(
        "sandfleet_cost_usd_total", tenant="local"
    )
    assert cost == pytest.approx((used["input"] * 1000 + used["output"] * 2000) / 1e6)
    assert after("sandfleet_unpriced_tokens_total") == 0


async def test_tenants_beyond_the_limit_share_one_label(stack):
    """Red when whoever makes tenants makes series without end. The limit of this stack is two."""
    before = await scrape(stack, "executor-1")
    for name in (uuid4().hex for _ in range(3)):
        async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
            key = await create_key(connection, Owner(name, "u"), "test")
        async with get_client(url=stack.info.api_url, api_key=key) as stranger:
            await stranger.runs.wait(None, "agent", input=asking({"text": "hello"}))
    after = await grown(stack, before, "sandfleet_tokens_total", tenant="other", kind="output")
    assert len(after.labels("sandfleet_tokens_total", "tenant")) == 3


@pytest.mark.parametrize(
    ("assistant", "given", "stage"),
    [
        ("asks", {"ask": {"raise": "x"}}, "graph"),
        ("agent", asking({"text": "x", "faults": [{"status": 400, "times": None}]}), "model"),
        ("agent", asking({"tool_calls": [{"name": "refuse", "args": {"what": "x"}}]}), "tool"),
    ],
)
async def test_failures_are_counted_by_where_they_come_from(stack, client, assistant, given, stage):
    """Red when a provider's failure counts as the graph's, or a tool's."""
    before = await scrape(stack, "executor-1")
    await client.runs.wait(None, assistant, input=given, raise_error=False)
    after = await grown(stack, before, "sandfleet_run_failures_total", stage=stage)
    assert after("sandfleet_run_failures_total") - before("sandfleet_run_failures_total") == 1


async def test_a_provider_that_limits_is_seen_though_a_retry_succeeds(stack, client):
    """Red when only what a model call comes to is counted, and the 429s that its client rides out are not."""
    before = await scrape(stack, "executor-1")
    fault = {"status": 429, "retry_after_s": 0.01, "times": 2}
    await client.runs.wait(None, "agent", input=asking({"text": "hello", "faults": [fault]}))
    after = await grown(stack, before, "sandfleet_model_responses_total", by=2, status="429")
    assert after("sandfleet_model_responses_total", status="2xx") > before(
        "sandfleet_model_responses_total", status="2xx"
    )
    assert after("sandfleet_model_call_seconds_count", outcome="ok") > before(
        "sandfleet_model_call_seconds_count", outcome="ok"
    )


async def test_what_is_under_way_is_seen_and_gone_after_a_cancel(stack, client):
    """Red when a call or a sandbox that was broken off stays under way for ever."""
    thread = await client.threads.create()

    async def under_way(**wanted):
        now = await scrape(stack, "executor-1")
        seen = {
            "runs": now("sandfleet_runs_active"),
            "models": now("sandfleet_model_calls_in_flight"),
            "tools": now("sandfleet_tool_calls_in_flight"),
            "sandboxes": now("sandfleet_run_sandboxes", state="held"),
        }
        return {name: seen[name] for name in wanted} == wanted

    for given, wanted in (
        (asking({"text": "never", "faults": [{"hang": True, "times": None}]}), {"runs": 1, "models": 1}),
        (asking(execute("sleep 300")), {"runs": 1, "tools": 1, "sandboxes": 1}),
    ):
        run = await client.runs.create(thread["thread_id"], "agent", input=given)
        await eventually(lambda w=wanted: under_way(**w), what=f"{wanted}")
        await client.runs.cancel(thread["thread_id"], run["run_id"], wait=True)
        await eventually(lambda: under_way(runs=0, models=0, tools=0, sandboxes=0), what="nothing under way")


async def test_sandboxes_are_timed(stack, client):
    """Red when acquiring or a command is not timed."""
    before = await scrape(stack, "executor-1")
    await client.runs.wait(None, "agent", input=asking(execute("true"), {"text": "done"}))
    await grown(stack, before, "sandfleet_sandbox_acquire_seconds_count", outcome="ok")
    await grown(stack, before, "sandfleet_sandbox_exec_seconds_count", outcome="ok")


async def test_the_gateway_counts_requests_by_route_and_sees_the_queue(stack, client, tmp_path):
    """Red when a path stands for itself, which makes a series for each thread, or when nobody reads the queue."""
    before = await scrape(stack, "api")
    threads = [await client.threads.create() for _ in range(3)]
    gate = tmp_path / "gate"
    runs = [
        await client.runs.create(t["thread_id"], "asks", input={"ask": {"hold": str(gate)}}) for t in threads
    ]
    route = "/threads/{thread_id}/runs"
    after = await grown(
        stack, before, "sandfleet_http_responses_total", by=3, process="api", method="POST", route=route
    )
    assert not any(
        t["thread_id"] in r for t in threads for r in after.labels("sandfleet_http_responses_total", "route")
    )

    async def running():
        return (await scrape(stack, "api"))("sandfleet_pool_runs_running", pool="default") >= 3

    await eventually(running, what="the gateway's look at the pool")
    gate.touch()
    await asyncio.gather(
        *(client.runs.join(t["thread_id"], r["run_id"]) for t, r in zip(threads, runs, strict=True))
    )
