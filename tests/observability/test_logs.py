"""Logs of every process hold ids and never content."""

import json
from uuid import uuid4

import httpx

from tests.observability.test_traces import asking, execute
from tests.waiting import eventually

MARK = f"m4rked{uuid4().hex}"


def lines(stack, process):
    """The JSON lines of a process."""
    text = (stack.root / "logs" / f"{process}.log").read_text(errors="replace")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def test_no_process_logs_what_a_tenant_sends_or_a_model_says(stack, client):
    """Red when an exception's message, a library's words, a warning or a header reaches a log.

    Marked are input, output, tool arguments, what a command prints, errors of nodes, tools, models, lost tasks and
    threads, metadata, configuration, headers, keys, and bodies that are refused.
    """
    inputs = [
        ("asks", {"ask": {"raise": MARK}}),
        ("asks", {"ask": {"lose": MARK}}),
        ("asks", {"ask": {"warn": MARK}}),
        ("agent", asking(execute(f"echo {MARK}; echo {MARK} >&2; exit 3"), {"text": f"said {MARK}"})),
        ("agent", asking({"tool_calls": [{"name": "refuse", "args": {"what": MARK}}]})),
        ("agent", asking({"text": MARK, "faults": [{"status": 400, "message": MARK, "times": None}]})),
        ("agent", asking({"text": MARK, "faults": [{"drop": True, "after_chunks": 1, "times": None}]})),
        ("agent", {"messages": MARK, MARK: {MARK: MARK}}),
    ]
    for assistant, given in inputs:
        await client.runs.wait(
            None,
            assistant,
            input=given,
            raise_error=False,
            metadata={"note": MARK},
            config={"configurable": {"note": MARK}, "tags": [MARK]},
        )
    key = {"x-api-key": stack.info.api_key}
    async with httpx.AsyncClient(base_url=stack.info.api_url, timeout=60, trust_env=False) as http:
        for headers, path, body in (
            (key, "/runs/wait", f'{{"assistant_id": "{MARK}", "input": {{}}}}'),
            (key, "/runs/wait", f'{{"{MARK}'),
            (key, f"/threads/{MARK}/runs", "{}"),
            (key, f"/runs/wait?{MARK}={MARK}", f'{{"assistant_id": "asks", "multitask_strategy": "{MARK}"}}'),
            ({"x-api-key": MARK}, "/runs/wait", "{}"),
            (
                {**key, "traceparent": MARK, "cookie": MARK, "x-note": MARK},
                "/runs/wait",
                '{"assistant_id": "asks"}',
            ),
        ):
            await http.post(path, content=body, headers={"content-type": "application/json", **headers})

    def said(message):
        return [line for line in lines(stack, "executor-1") if message in line["message"]]

    await eventually(lambda: said("Task exception was never retrieved"), what="the lost task's line")
    assert said("uncaught exception in a thread")[0]["exception"][0]["type"] == "KeyError"
    assert "UserWarning" in [line.get("category") for line in said("warning")]
    *_, library = [line for line in said("withheld") if line["logger"].startswith("langchain_core")]
    assert library["tenant"] == "local"
    assert library["run_id"]
    for log in sorted((stack.root / "logs").iterdir()):
        found = [line for line in log.read_text(errors="replace").splitlines() if MARK in line]
        assert not found, f"{log.name}: {found[0][:2000]}"
