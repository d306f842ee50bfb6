"""One trace from the request to the model call, and nothing of it costs a run anything."""

import json
import signal
from uuid import uuid4

import httpx
import psycopg

from sandfleet.loadtest.provider.scripts import SCRIPT_MARKER
from sandfleet.shared.permits import Permits
from sandfleet.shared.settings import Settings
from tests.waiting import eventually

CLOCKS_NS = 5_000_000  # between two readings of both clocks
SECRET = "s3cr3t-of-a-tenant"


def asking(*turns):
    script = {"turns": list(turns)}
    return {
        "messages": [
            {"role": "user", "content": f"{SECRET} #id:{uuid4()} {SCRIPT_MARKER}{json.dumps(script)}"}
        ]
    }


def execute(command):
    return {"tool_calls": [{"name": "execute", "args": {"command": command}}]}


async def run_with(stack, traceparent, assistant, given):
    """A run that is awaited; the caller names its span."""
    async with httpx.AsyncClient(base_url=stack.info.api_url, timeout=120, trust_env=False) as http:
        answer = await http.post(
            "/runs/wait",
            json={"assistant_id": assistant, "input": given},
            headers={"x-api-key": stack.info.api_key, "traceparent": traceparent},
        )
    return answer.raise_for_status().json()


def fresh():
    trace_id, span_id = uuid4().hex, uuid4().hex[:16]
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


async def test_a_trace_goes_from_the_caller_through_the_api_to_model_tool_and_sandbox(stack, collector):
    """Red when a part begins a trace of its own: the run forgets the header, or nodes, calls, sandbox and its host their
    parent."""
    trace_id, caller, traceparent = fresh()
    given = asking(execute("echo hi"), {"text": "done"})
    await run_with(stack, traceparent, "agent", given)

    def complete():
        spans = collector.of_trace(trace_id)
        return (
            spans
            if {"run", "finish", "PUT /sandbox", "POST /sandbox/exec"} <= {s.name for s in spans}
            and any("/runs/wait" in s.name for s in spans)
            else None
        )

    spans = await eventually(complete, what="the trace")
    by_id = {span.span_id: span for span in spans}

    def path(span):
        names = []
        while span is not None:
            names.append(span.name)
            if span.parent_id == caller:
                return [*names[::-1]]
            span = by_id.get(span.parent_id)
        raise AssertionError(f"{names} does not lead to the caller")

    paths = {" > ".join(path(span)) for span in spans}
    api = "POST /runs/wait"
    assert api in paths
    assert f"{api} > queue" in paths
    assert f"{api} > run > prepare" in paths
    assert f"{api} > run > finish" in paths
    assert f"{api} > run > node model > chat scripted" in paths
    assert f"{api} > run > node tools > sandbox acquire" in paths
    assert f"{api} > run > node tools > sandbox acquire > PUT /sandbox" in paths
    assert f"{api} > run > node tools > execute_tool execute > sandbox exec" in paths
    assert f"{api} > run > node tools > execute_tool execute > sandbox exec > POST /sandbox/exec" in paths
    (run,) = [span for span in spans if span.name == "run"]
    assert run.attributes["sandfleet.tenant"] == "local"
    assert run.attributes["sandfleet.status"] == "success"
    assert run.attributes["sandfleet.attempt"] == 1
    at_host = [span for span in spans if span.service == "sandfleet-host"]
    assert {span.attributes["sandfleet.run_id"] for span in at_host} == {run.attributes["sandfleet.run_id"]}
    assert all(span.attributes["http.response.status_code"] < 300 for span in at_host)
    models = [span for span in spans if span.name == "chat scripted"]
    assert all(span.attributes["gen_ai.usage.output_tokens"] > 0 for span in models)
    assert not any(span.failed for span in spans)
    for span in spans:
        parent = by_id.get(span.parent_id)
        assert span.start_ns <= span.end_ns
        assert parent is None or span.name == "queue" or parent.start_ns <= span.start_ns + CLOCKS_NS


async def test_a_sandbox_without_a_run_is_a_part_of_the_request_for_it(stack, collector):
    """Red when the API sends its host no `traceparent`."""
    trace_id, _, traceparent = fresh()
    headers = {"x-api-key": stack.info.api_key, "traceparent": traceparent}
    async with httpx.AsyncClient(
        base_url=stack.info.api_url, timeout=120, trust_env=False, headers=headers
    ) as http:
        made = (await http.post("/sandboxes", json={})).raise_for_status().json()
        await http.delete(f"/sandboxes/{made['sandbox_id']}")

    def found():
        of = {span.name: span for span in collector.of_trace(trace_id)}
        return of if of.keys() >= {"POST /sandboxes", "PUT /sandbox"} else None

    spans = await eventually(found, what="the spans of the API and the host")
    assert spans["PUT /sandbox"].parent_id == spans["POST /sandboxes"].span_id


async def test_the_model_provider_is_told_its_span(stack, collector):
    """Red when outgoing requests of a run carry no `traceparent`: the provider's own trace would stand alone."""
    trace_id, _, traceparent = fresh()
    await run_with(stack, traceparent, "agent", asking({"text": "one"}))
    async with httpx.AsyncClient(trust_env=False) as http:
        root = stack.info.provider_url.removesuffix("/v1")
        arrivals = (await http.get(f"{root}/_requests")).json()["requests"]
    told = [a["traceparent"] for a in arrivals if (a["traceparent"] or "").startswith(f"00-{trace_id}-")]
    (chat,) = await eventually(
        lambda: [s for s in collector.of_trace(trace_id) if s.name == "chat scripted"], what="the span"
    )
    assert told == [f"00-{trace_id}-{chat.span_id}-01"]


async def test_without_a_caller_the_api_begins_the_trace(stack, client, collector):
    """Red when a run without a header is traced by nobody, or apart from its request."""
    posted = "POST /threads/{thread_id}/runs"
    thread = await client.threads.create()
    run = await client.runs.create(thread["thread_id"], "asks", input={"ask": {}})
    await client.runs.join(thread["thread_id"], run["run_id"])

    def found():
        of = [s for s in collector.spans if s.attributes.get("sandfleet.run_id") == run["run_id"]]
        by_name = {s.name: s for s in of}
        return by_name if by_name.keys() >= {"run", posted} else None  # of two processes

    spans = await eventually(found, what="the spans of the request and the run")
    request = spans[posted]
    assert (request.parent_id, request.service) == ("", "sandfleet-api")
    assert (spans["run"].trace_id, spans["run"].parent_id) == (request.trace_id, request.span_id)


async def test_a_permit_carries_the_trace_of_the_run_that_it_was_sent_for(stack, client, collector):
    """Red when a run's way through the queue is no part of its trace. The executor is frozen until the permit is there."""
    trace_id, _, traceparent = fresh()
    permits = Permits(
        Settings(queue_urls=stack.info.queue_urls, aws_endpoint_url=stack.info.aws_endpoint_url)
    )
    thread = await client.threads.create()
    await stack.pause("executor-1")
    try:
        async with httpx.AsyncClient(base_url=stack.info.api_url, timeout=60, trust_env=False) as http:
            path, key = f"/threads/{thread['thread_id']}/runs", stack.info.api_key
            headers = {"x-api-key": key, "traceparent": traceparent}
            answer = await http.post(
                path, json={"assistant_id": "asks", "input": {"ask": {}}}, headers=headers
            )
        run = answer.raise_for_status().json()

        async def queued():
            attributes = await (await permits.client()).get_queue_attributes(
                QueueUrl=permits.url("default"), AttributeNames=["All"]
            )
            counts = attributes["Attributes"]
            return int(counts["ApproximateNumberOfMessages"]) + int(
                counts["ApproximateNumberOfMessagesNotVisible"]
            )

        await eventually(queued, what="the permit")
    finally:
        await stack.resume("executor-1")
        await permits.aclose()
    await client.runs.join(thread["thread_id"], run["run_id"])
    permit = await eventually(
        lambda: [s for s in collector.of_trace(trace_id) if s.name == "permit"], what="the permit's span"
    )
    assert permit[0].service == "sandfleet-executor"


async def test_what_fails_is_named_by_its_kind(stack, client, collector):
    """Red when a span of what failed looks like one that went well, or quotes the error."""
    trace_id, _, traceparent = fresh()
    await run_with(stack, traceparent, "asks", {"ask": {"raise": SECRET}})
    await eventually(lambda: "run" in found_names(collector, trace_id), what="the span of the run")
    spans = {span.name: span for span in collector.of_trace(trace_id)}
    assert spans["node act"].failed
    assert spans["node act"].attributes["error.type"] == "ValueError"
    assert spans["run"].attributes["error.type"] == "graph"


def found_names(collector, trace_id):
    return {span.name for span in collector.of_trace(trace_id)}


async def test_no_span_holds_what_a_tenant_sent(stack, collector):
    """Red when a span gets an input, an output, an argument or an error's message. Searches all that was sent so far."""
    trace_id, _, traceparent = fresh()
    given = asking(execute(f"echo {SECRET}"), {"tool_calls": [{"name": "refuse", "args": {"what": SECRET}}]})
    await run_with(stack, traceparent, "agent", given)
    await eventually(lambda: "run" in found_names(collector, trace_id), what="the span of the run")
    assert any(span.name == "execute_tool refuse" and span.failed for span in collector.of_trace(trace_id))
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_a_collector_that_hangs_costs_no_run_and_no_lease(stack, client, collector):
    """Red when spans are sent on an event loop: leases are not renewed meanwhile, and runs wait.

    Many more runs than a batch has spans end while the collector holds every request; none is tried twice, and the
    executor ends in time.
    """
    process = stack.supervisor.processes["executor-1"]
    collector.hang.set()
    try:
        before = collector.asked
        for _ in range(60):
            values = await client.runs.wait(None, "asks", input={"ask": {}})
            assert values["said"] == "done"
        await eventually(lambda: collector.asked > before, what="a request that hangs")
        attempts = await attempts_of(stack)
        assert attempts == 1
        await stack.kill("executor-1", signal.SIGTERM)
        await eventually(lambda: process.pid is None, what="the executor's end")
        assert process.exit_code == 0
    finally:
        collector.hang.clear()
        await stack.restart("executor-1")


async def attempts_of(stack):
    async with await psycopg.AsyncConnection.connect(stack.info.database_url) as connection:
        row = await (await connection.execute("select max(attempt) from runs")).fetchone()
    return row[0]
